"""The page at /training in headless Chromium: runs that go on and finished ones, their curves and samples."""
import json
import os
import pathlib
import subprocess

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from chromium import Tab, browser, needs_chromium  # noqa: F401 (a fixture)
from plumb_server import ROOT, serve, watch
from run_files import append, metrics, rl_metrics, sample, write_run

pytestmark = needs_chromium
PROMPT = [0, 3, 829, 4]  # begin of sentence, <User>, a word, <Assistant>
YES, NO, MAYBE, END = 438, 460, 1012, 1


def make_old(run):
    """As if nobody had written to it for an hour."""
    for file in run.iterdir():
        time = file.stat().st_mtime - 3600
        os.utime(file, (time, time))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run = write_run(folder / "finished", steps=3, total=3, mismatch=2)
    append(run / "log.txt", "2026-11-30 17:43:06 warning step 3: <b>look</b>", "2026-11-30 17:43:07 info    done: 3 steps, loss 0.3")
    append(run / "samples.jsonl",
           sample(1, 0, PROMPT, [YES, END], 0.0, [0.0, 0.0]),
           sample(3, 0, PROMPT, [MAYBE, END], 1.0, [0.0, 0.0]),
           sample(3, 1, PROMPT, [YES, NO, END], 0.25, [0.0, -0.25, 1e-6]),
           sample(3, 2, PROMPT, [NO, END], 0.5, []),
           sample(3, 3, PROMPT, [NO, END], 0.0, [], failure="the reward <i>failed</i>"))
    make_old(run)
    run = write_run(folder / "sft", command="train", steps=5)
    append(run / "metrics.jsonl", metrics(6, **{"eval/loss": 0.125}))
    make_old(run)
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with watch(folder) as address:
        yield address


class Training(Tab):
    def __init__(self, browser, address, hash="", path="/training"):
        browser.get("about:blank")  # another hash alone would load nothing
        super().__init__(browser, f"{address}{path}#{hash}")
        self.wait(lambda: self.tiles() or self.one("#empty").text != "…")

    def tiles(self):
        return self.run("""return Object.fromEntries([...document.querySelectorAll("#tiles div")]
                           .map(d => [d.children[0].textContent, [...d.children].slice(1).map(e => e.textContent)]))""")

    def points(self, figure, run=None):
        """[[step, value]] as the chart has them."""
        return self.run("""const l = charts.get(arguments[0])?.list?.filter(l => !l.evaluation)
                             .filter(l => !arguments[1] || l.run.name === arguments[1]);
                           return l?.length ? l[0].x.map((x, i) => [x, l[0].value[i]]) : []""", figure, run)

    def coloured_pixels(self, figure):
        """Pixels of each colour of a run in a chart; those at the edge of a line let the ground through."""
        return self.run("""
          const c = charts.get(arguments[0]).canvas, d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
          return drawn.map(({colour}) => { let n = 0; const [r, g, b] = colour.match(/\\w\\w/g).map(x => parseInt(x, 16));
            const near = (a, b) => Math.abs(a - b) < 40;
            for (let i = 0; i < d.length; i += 4) n += near(d[i], r) && near(d[i + 1], g) && near(d[i + 2], b) && d[i + 3] > 150;
            return n; });""", figure)

    def column(self, number):
        return self.run("return [...document.querySelectorAll('#rows tr')].map(r => r.children[arguments[0]].textContent)", number)


@pytest.fixture
def page(browser, address):
    page = Training(browser, address, "run=finished")
    page.wait(lambda: page.all("#rows tr"))
    yield page
    assert page.console() == []
    assert page.outside(address) == []


# ---- A run that goes on --------------------------------------------------------------------------------------------------

def test_the_page_follows_a_run(browser, tmp_path):
    run = write_run(tmp_path / "live", steps=2, total=10)
    with watch(tmp_path) as address:
        page = Training(browser, address)
        page.wait(lambda: page.points("reward") == [[1, 0.1], [2, 0.2]])
        assert page.tiles()["Mismatch tokens"] == ["0", "0, all equal, in every step"]
        assert page.one("[data-name=mismatch_tokens] figcaption").text.endswith("0, all equal, in every step")
        assert page.tiles()["Time left"][0] == "16 s"  # two seconds a step
        # Half a line waits for its other half.
        line = json.dumps(rl_metrics(3, mismatch=5))
        with open(run / "metrics.jsonl", "a") as file:
            file.write(line[:20])
            file.flush()
            append(run / "log.txt", "2026-11-30 17:43:06 warning while the line is half written")
            page.wait(lambda: page.one("#warnings").is_displayed())
            assert len(page.points("reward")) == 2
            file.write(line[20:] + "\n")
        page.wait(lambda: page.points("mismatch_tokens") == [[1, 0], [2, 0], [3, 5]])
        page.wait(lambda: page.tiles()["Mismatch tokens"] == ["5", "unequal in 1 of 3 steps"])
        assert page.tiles()["Step"][0] == "3"
        append(run / "samples.jsonl", sample(3, 0, PROMPT, [YES, END], 0.5, [0.0, 0.0]))
        page.wait(lambda: page.all("#rows tr"))
        append(run / "samples.jsonl", sample(4, 0, PROMPT, [NO, END], 0.5, [0.0, 0.0]))
        page.wait(lambda: page.column(2) == ["no"])
        # Of a file that only grows nothing is asked for twice.
        assert page.run("""return performance.getEntriesByType("resource").map(e => new URL(e.name))
          .filter(u => u.pathname.endsWith("/metrics")).filter(u => u.searchParams.get("from") === "0").length""") == 1

        # It goes on from step 1: the file is written anew, as plumb does it.
        fresh = tmp_path / "fresh"
        append(fresh, *(rl_metrics(s) for s in (1, 2)), {**rl_metrics(3), "reward": 0.9})
        fresh.rename(run / "metrics.jsonl")
        page.wait(lambda: page.points("reward") == [[1, 0.1], [2, 0.2], [3, 0.9]])
        # Cut off in place.
        os.truncate(run / "metrics.jsonl", len(json.dumps(rl_metrics(1))) + 1)
        page.wait(lambda: page.points("reward") == [[1, 0.1]])
        # Begun anew.
        os.truncate(run / "metrics.jsonl", 0)
        page.wait(lambda: page.points("reward") == [] and page.all("figure") == [])
        # Lines of an earlier step behind later ones.
        append(run / "metrics.jsonl", rl_metrics(1), rl_metrics(2), rl_metrics(3), {**rl_metrics(2), "reward": 0.7})
        page.wait(lambda: page.points("reward") == [[1, 0.1], [2, 0.7]])

        append(run / "log.txt", "2026-11-30 17:43:07 info    done: 2 steps, loss 0.3")
        page.wait(lambda: "Finished" in page.tiles())
        write_run(tmp_path / "later")
        page.wait(lambda: len(page.all("#runs li")) == 2)
        assert page.console() == []


def test_a_server_that_goes_away_is_told(browser, tmp_path):
    write_run(tmp_path / "run")
    with watch(tmp_path) as address:
        page = Training(browser, address)
    page.wait(lambda: page.one("#problem").is_displayed())
    assert page.one("#problem").text == "The server cannot be reached."


# ---- A finished run ------------------------------------------------------------------------------------------------------

def test_tiles_curves_and_warnings_of_a_finished_run(page):
    tiles = page.tiles()
    assert tiles["Reward"][0] == "0.3" and tiles["Finished"] == ["✓", "took 4 s"]
    assert tiles["Mismatch tokens"] == ["2", "unequal in 3 of 3 steps"]
    assert page.points("mismatch_tokens") == [[1, 2], [2, 2], [3, 2]]
    first = [figure.get_attribute("data-name") for figure in page.all("#first figure")]
    assert first[:3] == ["reward", "mismatch_tokens", "loss"]
    assert min(page.coloured_pixels("reward")) > 50
    page.one("#warnings summary").click()
    assert page.one("#warnings li").text.endswith("step 3: <b>look</b>") and page.all("#warnings b") == []
    page.one("#more summary").click()
    page.wait(lambda: min(page.coloured_pixels("steps_behind")) > 50)


def test_hover_and_keys_read_the_curves(page):
    ActionChains(page.browser).move_to_element(page.one("[data-name=reward] canvas")).perform()
    assert "reward, step 2" in page.one("#tooltip").text and "0.2" in page.one("#tooltip").text
    assert len([c for c in page.all(".cursor") if c.is_displayed()]) == len(page.all("#first figure"))
    canvas = page.one("[data-name=loss] canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert "loss, step 3" in page.one("#tooltip").text
    assert page.one("#spoken").get_attribute("textContent") == "step 3: 0.6667"
    canvas.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert "loss, step 1" in page.one("#tooltip").text


def test_scales_and_smoothing(page):
    before = page.run("return charts.get('loss').canvas.toDataURL()")
    for control in ("#log", "#axis", "#smooth"):
        page.one(control).send_keys({"#log": Keys.SPACE, "#axis": "h", "#smooth": Keys.ARROW_RIGHT * 10}[control])
        after = page.run("return charts.get('loss').canvas.toDataURL()")
        assert after != before
        before = after
    assert page.one("#smoothing").text == "0.2"
    assert [x for x, _ in page.points("loss")] == pytest.approx([0, 2 / 3600, 4 / 3600])
    # Debiased: constant values stay what they are, others begin at their first value.
    assert page.run("return smoothed([2, 2, 2], 0.9)") == pytest.approx([2, 2, 2])
    assert page.run("return smoothed([1, 3], 0.5)") == pytest.approx([1, (0.5 * 0.5 * 1 + 0.5 * 3) / 0.75])
    assert page.coloured_pixels("mismatch_tokens")[0] > 50  # and zeros on a logarithmic scale are no error


def test_two_runs_in_one_chart_and_evaluations_beside(page):
    page.one("#runs input[aria-label='Draw sft']").click()
    page.wait(lambda: len(page.points("loss", "sft")) == 6)
    page.wait(lambda: min(page.coloured_pixels("loss")) > 50)
    evaluations = page.run("return charts.get('loss').list.filter(l => l.evaluation).map(l => [l.run.name, l.x, l.value])")
    assert evaluations == [["sft", [6], [0.125]]]
    assert len(page.all("[data-name=loss] .swatch")) == 2
    assert page.tiles()["Reward"]  # still those of the first run
    assert page.run("return location.hash") == "#run=finished&with=sft"
    # The address opens the same again.
    page.browser.refresh()
    page.wait(lambda: len(page.points("loss", "sft")) == 6 and "Reward" in page.tiles())
    page.one("#runs input[aria-label='Draw finished']").click()
    page.wait(lambda: "Loss" in page.tiles() and "Reward" not in page.tiles())
    assert page.tiles()["Loss"] == ["0.1667", "evaluation 0.125"] and page.tiles()["Stopped"][0] == "■"
    assert not page.one("#samples").is_displayed()


# ---- Samples -------------------------------------------------------------------------------------------------------------

def test_samples_are_sorted_and_found_by_step(page):
    assert page.column(0) == ["0", "1", "2", "3"]
    assert page.column(2) == ["maybe", "yesno", "no", "no"]
    assert page.column(3) == ["1", "0.25", "0.5", "failed"]
    assert page.column(6) == ["0, all equal", "2 of 3", "–", "–"]
    page.all("#columns button")[3].click()
    assert page.column(0) == ["0", "2", "1", "3"]
    assert page.all("#columns th")[3].get_attribute("ariaSort") == "descending"
    page.all("#columns button")[3].click()
    assert page.column(0) == ["3", "1", "2", "0"]
    page.one("#before").click()
    page.wait(lambda: page.column(2) == ["yes"])
    assert not page.one("#newest").is_selected() and not page.one("#before").is_enabled()
    page.one("#step").send_keys(Keys.BACKSPACE, "2", Keys.ENTER)
    page.wait(lambda: page.one("#count").text.startswith("1 of 1"))
    page.one("#newest").click()
    page.wait(lambda: len(page.column(0)) == 4)


def test_a_sample_with_its_tokens(page):
    page.all("#rows button")[0].send_keys(Keys.ENTER)
    page.wait(lambda: page.one("#verdict").text == "Difference of training's log-probabilities to the recorded ones: 0, all 2 equal.")
    assert page.one("#verdict").get_attribute("class") == "good"
    assert "reward 1 · choice 1 · advantage 0.5" in page.one("#sample").text and "<｜User｜>" in page.one("#sample").text
    page.all("#rows tr")[1].click()
    page.wait(lambda: len(page.all(".token")) == 3)
    assert page.one("#verdict").text.startswith("Training's log-probability differs for 2 of 3 tokens, by up to 0.25 nats.")
    grounds = page.run("return [...document.querySelectorAll('.token')].map(t => getComputedStyle(t).backgroundColor)")
    sizes = page.run("return [...document.querySelectorAll('.token')].map(t => Number(t.style.getPropertyValue('--size')))")
    assert sizes[0] == 0 and grounds[0].endswith("/ 0)") and sizes[1] > sizes[2] > 0.1 and len(set(grounds)) == 3
    ActionChains(page.browser).move_to_element(page.all(".token")[1]).perform()
    tooltip = page.one("#tooltip").text
    assert '"no"' in tooltip and "-1.500000" in tooltip and "-2.500e-1" in tooltip
    page.all(".said")[1].send_keys(Keys.ARROW_LEFT)
    assert "0, equal" in page.one("#tooltip").text
    page.all("#rows tr")[2].click()
    page.wait(lambda: "nothing to compare" in page.one("#verdict").text)
    assert page.one("#verdict").get_attribute("class") == ""
    page.all("#rows tr")[3].click()
    page.wait(lambda: "No reward: the reward <i>failed</i>" in page.one("#sample").text)
    assert page.all("#sample i") == []


# ---- Around it -----------------------------------------------------------------------------------------------------------

def test_every_control_has_a_name(page):
    assert page.unnamed_controls() == []


def test_nothing_is_wider_than_a_narrow_screen(page):
    page.narrow()
    try:
        page.wait(lambda: page.all("#rows tr"))
        page.all("#rows tr")[1].click()
        page.wait(lambda: page.all(".token"))
        assert page.width() <= 360
    finally:
        page.wide()


def test_odd_runs_do_no_harm(browser, tmp_path):
    write_run(tmp_path / "<img src=x>")
    empty = tmp_path / "empty"
    empty.mkdir()
    append(empty / "metrics.jsonl", "garbage", '{"step": 1, "loss": "x"}', '{"step": 2}', '{"step": 3, "loss": null}')
    with watch(tmp_path) as address:
        page = Training(browser, address, "run=empty", path="/")
        page.wait(lambda: page.tiles().get("Step", [""])[0] == "3")
        assert page.all("figure") == [] and page.all("#runs img") == []
        page.wait(lambda: "<img src=x>" in page.one("#runs").text)
        assert page.console() == []


def test_beside_the_chat_and_with_a_key(browser, tmp_path):
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "keys").write_text("sk-right\n")
    with serve("--runs", tmp_path / "runs", "--api-keys", tmp_path / "keys") as address:
        page = Tab(browser, address + "/training")
        page.wait(lambda: page.one("#key").is_displayed())
        page.one("#key").send_keys("sk-right", Keys.ENTER)
        page.wait(lambda: page.all("#tiles div"))
        page.one("#chat").click()
        page.wait(lambda: page.all("#model option"))
        page.browser.find_element(By.LINK_TEXT, "Training").click()
        page.wait(lambda: page.all("#tiles div"))


def test_without_runs_the_page_says_how_to_name_them(browser):
    with serve() as address:
        page = Training(browser, address)
        assert "--runs DIR" in page.one("#empty").text


def test_a_real_run(browser, tmp_path):
    """What plumb rl writes is what the page reads: here with an adapter that is one step old, so that there is a difference."""
    for name, behind in (("now", 0), ("behind", 1)):
        done = subprocess.run([os.environ["PLUMB"], "rl", "examples/rl/demo.toml", "--set", f"output.dir={tmp_path / name}",
                               "--set", "train.steps=3", "--set", f"rl.steps_behind={behind}", "--set", "rl.groups_per_step=3",
                               "--set", f"model.path={ROOT / 'assets/tiny'}"],  # the texts of tokens are read from there
                              cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    lines = {name: [json.loads(line) for line in pathlib.Path(tmp_path / name / "metrics.jsonl").read_text().splitlines()]
             for name in ("now", "behind")}
    with watch(tmp_path) as address:
        page = Training(browser, address, "run=now&with=behind")
        for name in ("now", "behind"):
            expected = [[l["step"], l["mismatch_tokens"]] for l in lines[name] if "mismatch_tokens" in l]
            page.wait(lambda: page.points("mismatch_tokens", name) == expected)
            assert (sum(v for _, v in expected) > 0) == (name == "behind")
        assert page.tiles()["Finished"]
        page.wait(lambda: page.all("#rows tr"))
        assert all(v in ("0, all equal", "–") for v in page.column(6))
        page.all("#rows tr")[0].click()
        page.wait(lambda: page.all(".token"))
        first = next(s for s in map(json.loads, open(tmp_path / "now" / "samples.jsonl")) if s["step"] == 3)
        assert "".join(t.get_attribute("textContent") for t in page.all(".token")) == first["answer"]
        assert page.console() == []
