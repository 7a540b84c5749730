"""The page of `dad report` in a real browser, headless: what its script makes, sorting, and both colour
schemes. Skipped where there is no Chromium (scripts/packages.txt)."""

import json
import re
import shutil
import subprocess

import pytest

from dad.observe.page import page
from dad.observe.trace import slowest_step

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NUM_LAYERS = 500
# Clicks on a column, types into the filter, and leaves what happened as attributes.
USE = """<script>
const body = document.querySelector('#tensors tbody');
document.querySelectorAll('#tensors th')[2].click();
document.body.dataset.most = body.rows[0].cells[0].textContent;
document.querySelectorAll('#tensors th')[2].click();
document.body.dataset.least = body.rows[0].cells[0].textContent;
const field = document.getElementById('find');
field.value = 'layer499'; field.oninput();
document.body.dataset.shown = [...body.rows].filter(row => !row.hidden).length;
document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;
</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is here: scripts/setup.sh browser")
    profile = tmp_path_factory.mktemp("profile")

    def run(file, *flags):
        command = [found, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", "--window-size=1280,1000", *flags, file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "Uncaught" not in done.stderr, done.stderr
        return done.stdout

    return run


def job():
    """Two lines of three ranks, with everything that a page shows."""
    names = [f"<layer>{i}" if i == 7 else f"layer{i}" for i in range(NUM_LAYERS)]
    tensors, plan = {}, []
    for i, name in enumerate(names):
        tensors[name] = {
            "steps": 50,
            "wire_bytes_sent": 1000 + i,
            "dense_bytes": 100_000,
            "ratio": 90.0,
            "effective": 4.0 if i % 2 else 0.25,
            "worst": {"step": 3, "seconds": 0.02, "last_rank": 1},
        }
        plan.append(
            {
                "name": name,
                "method": "rank_dad" if i % 2 else "vgc",
                "why": "rank 4 of 64x64, owner",
                "dense_bytes": 2000,
                "predicted_bytes": 20,
                "measured_bytes": 30,
                "predicted_ms": 0.5,
                "measured_ms": 1.0,
            }
        )
    samples = [
        {
            "seconds": float(t),
            "steps": 5 * t,
            "wire_bytes_sent": 1000 * t,
            "effective": {name: tensor["effective"] for name, tensor in tensors.items()} if t > 2 else {},
        }
        for t in range(1, 11)
    ]
    step = [[name, 10 * i, 10 * i + 100, 10 * i + 900, 2 if i % 3 else -1] for i, name in enumerate(names)]
    stats = {
        "steps": 50,
        "wire_bytes_sent": 600_000,
        "wire_bytes_received": 600_000,
        "messages_sent": 9,
        "dense_bytes": 60_000_000,
        "tensors": tensors,
    }
    first = {
        "job": "j",
        "rank": 0,
        "size": 3,
        "stats": stats,
        "plan": plan,
        "samples": samples,
        "step": {"step": 12, "tensors": step},
        "exposed_ms": 7.5,
        "events": [
            {"seconds": 1.0, "kind": "plan", "text": 'step 9: "layer3" had more rows'},
            {"seconds": 2.5, "kind": "warning", "text": "a gradient was not finite"},
        ],
    }
    return [first, {"job": "j", "rank": 2, "size": 3, "stats": stats, "ended_by": "SIGTERM"}]


def test_a_browser_shows_all_of_500_layers_and_sorts_and_filters_them(browser, tmp_path):
    file = tmp_path / "report.html"
    text = page("j", job())
    assert "//" not in re.sub(r"http://www.w3.org", "", text.partition("<script>")[0])  # nothing to fetch
    file.write_text(text.replace("</body>", USE + "</body>"))
    seen = browser(file, "--virtual-time-budget=3000", "--dump-dom")
    attributes = dict(re.findall(r'data-(\w+)="([^"]*)"', seen[seen.index("<body") :][:400]))
    assert attributes == {"most": "layer499", "least": "layer0", "shown": "1", "wide": "false"}
    # Both maps were painted: 250 tensors in the 8 samples that had them.
    assert re.findall(r'data-cells="(\d+)"', seen) == ["2000", "2000"]
    for said in (
        "Rank 2 was last for 333 of 500 tensors",
        "step 9: &quot;layer3&quot; had more rows",
        "a gradient was not finite",
        "was ended by SIGTERM",
        "wrote no line",
        "7.5 ms",
        "1.5x",
        "&lt;layer&gt;7",
    ):
        assert said in seen or said.replace("&quot;", '"') in seen, said
    assert "<layer>" not in seen
    assert seen.count('<rect class="sends"') == NUM_LAYERS


def test_the_page_follows_the_colour_scheme(browser, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    file = tmp_path / "report.html"
    file.write_text(page("j", job()))
    shades = []
    for number, scheme in enumerate(("dark", "light")):
        shot = tmp_path / f"{scheme}.png"
        browser(file, f"--blink-settings=preferredColorScheme={number}", f"--screenshot={shot}")
        pixels = image.imread(shot)[..., :3].mean(axis=-1)
        assert pixels.shape == (1000, 1280)
        # The background, and something that stands out against it.
        shades.append(pixels[2, 2])
        assert abs(pixels - pixels[2, 2]).max() > 0.6
    assert shades[0] < 0.1 and shades[1] == 1.0


def test_of_a_trace_the_slowest_whole_step_is_kept():
    events = [{"ph": "M", "pid": 1, "args": {"tensor": "a"}}, {"ph": "M", "pid": 2, "args": {"tensor": "b"}}]

    def add(pid, step, submit, first, result):
        wait = {"ph": "X", "pid": pid, "ts": submit, "dur": first - submit, "args": {"step": step}}
        sent = {
            "ph": "X",
            "pid": pid,
            "ts": first,
            "dur": result - first,
            "args": {"step": step, "last_rank": 1},
        }
        events.append({**wait, "name": "WAIT_FOR_BATCH"})
        events.append({**sent, "name": "ROUND_0"})
        events.append({**sent, "name": "ALLREDUCE"})

    add(2, 1, 0, 500, 9000)  # the trace began in the middle of it
    for step, length in ((2, 100), (3, 300), (4, 200), (5, 900)):
        for pid in (1, 2):
            add(pid, step, 1000 * step + pid, 1000 * step + 10, 1000 * step + length)
    found = slowest_step(events)
    assert found == {"step": 3, "tensors": [["a", 0, 9, 299, 1], ["b", 1, 9, 299, 1]]}
    assert slowest_step([]) is None
    assert json.loads(json.dumps(found)) == found
