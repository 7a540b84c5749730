"""TensorBoard's event files, Prometheus' endpoint, and the progress line: of a real job, and their formats."""

import io
import json
import struct
import subprocess
import sys

import pytest

from dad.observe import metrics
from dad.observe.progress import Progress
from dad.observe.scalars import scalars
from dad.observe.tensorboard import EventFile, TensorBoard, _masked_crc
from util import free_ports, job_environment, needs_torch

TRAIN = """
import sys
import urllib.error
import urllib.request
import torch
import dad
import dad.torch as hvd
hvd.init()
model = torch.nn.Linear(64, 64)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression="rank_dad:rank=2",
)
board = dad.TensorBoard(sys.argv[1], every=5)
progress = dad.Progress(total=20)
for step in range(20):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    board.step(loss=loss)
    progress.step(loss)
port = int(sys.argv[2]) + hvd.local_rank()
print(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
try:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/other")
except urllib.error.HTTPError as error:
    print("other:", error.code)
hvd.barrier()
"""


def records(path):
    """The messages of an event file, with their checksums checked."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (_masked_crc(data[:8]),)
        event = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (_masked_crc(event),)
        found.append(event)
        data = data[16 + length :]
    return found


def test_a_job_tells_tensorboard_prometheus_and_the_terminal(tmp_path):
    needs_torch()
    (tmp_path / "train.py").write_text(TRAIN)
    port = free_ports(1)
    command = [sys.executable, "-m", "dad.runner.cli", "-np", "2", sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(
        [*command, str(tmp_path / "runs"), str(port)],
        env=job_environment(DAD_METRICS_PORT=str(port)),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "runs").iterdir()  # of rank 0 only
    version, *points = records(file)
    assert version.endswith(b"brain.Event:2")
    assert len(points) == 4 and all(b"dad/bytes_per_step" in point for point in points)
    assert b"loss" in points[0] and b"dad_effective/weight" in points[-1]
    assert '[0]<stdout>:dad_steps_total{rank="0"} ' in done.stdout
    assert '[1]<stdout>:dad_steps_total{rank="1"} ' in done.stdout
    assert '[0]<stdout>:dad_tensor_effective{rank="0",tensor="weight"} 4.0' in done.stdout  # rank 2 from each
    assert done.stdout.count("other: 404") == 2
    assert "Warning" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if "step 20 of 20 (100 %)" in line]
    assert (
        len(lines) == 1 and lines[0].startswith("[0]") and "loss 0." in lines[0] and "0:00 left" in lines[0]
    )


def test_tensorflow_reads_the_event_file(tmp_path):
    tf = pytest.importorskip("tensorflow")
    file = EventFile(tmp_path)
    file.write({"a/b": 0.5, "c": 3.0}, 1000)
    file.close()
    (path,) = tmp_path.iterdir()
    events = [tf.compat.v1.Event.FromString(raw.numpy()) for raw in tf.data.TFRecordDataset(str(path))]
    assert events[0].file_version == "brain.Event:2"
    assert events[1].step == 1000 and events[1].wall_time > 1e9
    assert {value.tag: value.simple_value for value in events[1].summary.value} == {"a/b": 0.5, "c": 3.0}


def test_the_checksum_is_that_of_the_standard():
    # RFC 3720, B.4: 32 zeros have 0x8a9136aa.
    crc = 0x8A9136AA
    assert _masked_crc(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


STATS = {
    "steps": 10,
    "wire_bytes_sent": 1000,
    "wire_bytes_received": 2000,
    "messages_sent": 5,
    "dense_bytes": 4000,
    "ratio": 4.0,
    "tensors": {'a"b': {"wire_bytes_sent": 7, "effective": 0.5}, "dense": {"wire_bytes_sent": 9}},
}


def test_scalars_are_of_the_steps_since_the_last_ones():
    later = {**STATS, "steps": 20, "wire_bytes_sent": 1500}
    assert scalars(STATS)["dad/bytes_per_step"] == 100
    now = scalars(later, STATS)
    assert (now["dad/bytes_per_step"], now["dad/bytes_sent"], now["dad/ratio"]) == (50, 1500, 4)
    assert {name for name in now if name.startswith("dad_effective")} == {'dad_effective/a"b'}


def test_metrics_have_types_and_escaped_names():
    text = metrics.text(STATS, 3)
    assert 'dad_wire_bytes_sent_total{rank="3"} 1000\n' in text
    assert 'dad_tensor_effective{rank="3",tensor="a\\"b"} 0.5\n' in text
    names = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    types = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert names == types and json.dumps(sorted(names)).count("_total") == 6


def test_the_progress_line_estimates_what_is_left():
    progress = Progress(total=1000, file=io.StringIO())
    for _ in range(101):
        progress.step()
    text = progress.text(0.43215, 39.2e6, progress._began + 10.0)
    assert text == "step 101 of 1,000 (10 %)  loss 0.4321  39.2 MB sent  100 ms/step  1:30 left"
    assert "left" not in Progress().text(None, 0, 0.0)


def test_misuse_of_a_board():
    with pytest.raises(ValueError, match="every=0"):
        TensorBoard("x", every=0)
