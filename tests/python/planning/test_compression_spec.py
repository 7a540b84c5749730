"""Specs of compression methods: the same from Python, the command line and the environment."""

import copy
import pickle

import pytest

from dad.methods import compression
from dad.methods.compression import Compression, parse, resolve


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16", "per_layer:fc*.weight=fp16;*=none"])
def test_a_spec_survives_the_round_trip(spec):
    assert parse(spec).spec() == spec
    assert parse(parse(spec).spec()) == parse(spec)


@pytest.mark.parametrize(
    ("call", "method"),
    [
        ("rank_dad(2)", Compression.rank_dad(2)),
        ('rank_dad(rank=2, wire="int8")', Compression.rank_dad(2, wire="int8")),
        # What a shell leaves of the quotes.
        (
            "rank_dad(2,wire=int8,error_feedback=false)",
            Compression.rank_dad(2, wire="int8", error_feedback=False),
        ),
        ("Compression.int8(256, warmup_steps=3)", Compression.int8(256, warmup_steps=3)),
        ("none()", Compression.none()),
        ("auto(budget=None)", Compression.auto()),
        ("per_layer:fc*=rank_dad(2,wire=int8);*=none", {"fc*": "rank_dad:rank=2,wire=int8", "*": "none"}),
        ("per_layer({'fc*': rank_dad(2), '*': none})", {"fc*": "rank_dad:rank=2", "*": "none"}),
    ],
)
def test_a_call_as_in_a_script_is_a_spec(call, method):
    assert parse(call) == (Compression.per_layer(method) if isinstance(method, dict) else method)


def test_a_class_and_its_instance_mean_the_same():
    assert resolve(Compression.fp16) == resolve(Compression.fp16()) == resolve("fp16")


def test_an_object_with_compress_and_decompress_is_taken_as_it_is():
    class Own:
        @staticmethod
        def compress(tensor):
            return tensor, None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor

    assert resolve(Own) is Own
    with pytest.raises(ValueError, match="compress"):
        resolve(object())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("rank_dad:rank=0", ["rank=0", "integer from 1"]),
        ("rank_dad:wire=int3", ["wire='int3'", "int4"]),
        ("rank_dad:rank=four", ["rank='four'"]),
        ("topk:ratio=0", ["ratio=0.0", "above 0"]),
        ("topk:ratio=1.5", ["ratio=1.5", "above 0.0 to 1.0"]),
        ("strom:tau=-1", ["tau=-1.0", "above 0.0"]),
        ("topk:error_feedback=perhaps", ["error_feedback='perhaps'", "True or False"]),
        ("qsgd:bits=9", ["bits=9", "8"]),
        ("chunk_topk:chunk=16", ["k=64", "integer from 1 to 16"]),
        ("chunk_topk:on=momentun", ["on='momentun'", "(did you mean momentum?)"]),
        ("vgc:zeta=2", ["zeta=2.0"]),
        ("auto:budget=0", ["budget=0"]),
        ("int8:warmup_steps=-1", ["warmup_steps=-1"]),
        ("fp16:rank=4", ["compression fp16", "no option rank='4'", "it has none"]),
        ("int8:rank=4", ["compression int8", "no option rank='4'", "warmup_steps, bucket, error_feedback"]),
        ("per_layer:*=topk:k=2", ["compression topk", "no option k='2'"]),
        ("gzip", ["no method 'gzip'", "none, fp16"]),
        ("fp16:rank", ["'rank'", "key=value"]),
        ("rank_dda(4)", ["no method 'rank_dda' (did you mean rank_dad?)"]),
        ("rank_dad(rnak=4)", ["no option rnak='4' (did you mean rank?)"]),
        ("topk:ratoi=0.1", ["no option ratoi='0.1' (did you mean ratio?)"]),
        ("rank_dad(wire=itn8)", ["wire='itn8'", "(did you mean int8?)"]),
        ("rank_dad(open('f'))", ["open('f') is not a constant"]),
        ("int8(1, 2, 3, 4)", ["int8 takes at most 3 options"]),
        ("rank_dad(4 4)", ["expected METHOD(option=value, …)"]),
        ("per_layer:", ["at least one"]),
    ],
)
def test_a_bad_spec_is_refused_with_option_value_and_range(spec, words):
    with pytest.raises(ValueError) as error:
        parse(spec)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_option_that_does_not_exist_is_refused_like_one_out_of_range():
    with pytest.raises(ValueError) as error:
        Compression.rank_dad(rank=2, bogus=1)
    for word in ("compression rank_dad", "bogus=1", "rank, tol, energy"):
        assert word in str(error.value)
    with pytest.raises(ValueError, match="it has none"):
        Compression.none(rank=4)
    with pytest.raises(ValueError, match="methods"):
        Compression.per_layer({"*": "none"}, rank=4)
    assert copy.deepcopy(Compression.rank_dad(2, wire="int8")) == Compression.rank_dad(rank=2, wire="int8")
    assert pickle.loads(pickle.dumps(Compression.topk(0.5))) == Compression.topk(ratio=0.5)


def test_every_method_of_the_table_has_its_place_in_compression():
    for name, method in compression._METHODS.items():
        assert getattr(Compression, name) is method


def test_the_first_glob_wins_and_the_rest_is_dense():
    mixed = Compression.per_layer({"fc*.weight": Compression.fp16, "*.weight": Compression.bf16})
    assert mixed.method_for("fc1.weight") == Compression.fp16()
    assert mixed.method_for("conv.weight") == Compression.bf16()
    assert mixed.method_for("conv.bias") == Compression.none()


def test_the_environment_is_used_where_a_script_names_no_method(monkeypatch):
    monkeypatch.delenv("DAD_COMPRESSION", raising=False)
    assert compression.from_environment() == Compression.none()
    monkeypatch.setenv("DAD_COMPRESSION", "bf16")
    assert compression.from_environment() == Compression.bf16()
