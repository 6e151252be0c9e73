"""The server as clients meet it: OpenAI's own client, plain HTTP, many at once, and bad manners."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
import httpx  # noqa: E402

import csv_decode.head  # noqa: E402
from csv_decode.llama import LlamaModel  # noqa: E402
from csv_decode.server import Limits, create_app  # noqa: E402

from . import tiny_gguf  # noqa: E402

KEY = "sesame"
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"


class Server:
    """A server in a thread."""

    def __init__(self, model: LlamaModel, **more: Any) -> None:
        self.app = create_app(model, "tiny", **more)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=self.port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.app.state.worker.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSV_DECODE_CACHE", str(folder / "cache"))
        patch.setattr(csv_decode.head, "SMALL_HEAD", 0)
        path = tiny_gguf.write(folder / "tiny.gguf", template=TEMPLATE)
        with LlamaModel(path, threads=1, calibration_states=300) as made:
            yield made


@pytest.fixture(scope="module")
def server(model: LlamaModel) -> Iterator[Server]:
    made = Server(model, api_key=KEY, limits=Limits(waiting=32, tokens=64))
    yield made
    made.close()


@pytest.fixture
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def post(server: Server, path: str, key: str | None = KEY, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


def test_completions_are_what_the_model_writes(client: Any, model: LlamaModel) -> None:
    out = client.completions.create(model="tiny", prompt="the of", max_tokens=12, temperature=0)
    run = model.generate("the of", 12).run()
    assert out.choices[0].text == run.text
    assert out.choices[0].finish_reason == run.finish
    assert out.usage.completion_tokens == len(run.ids)
    assert out.usage.prompt_tokens == run.prompt_tokens
    by_ids = client.completions.create(
        model="tiny", prompt=model.vocabulary.encode("the of"), max_tokens=12, temperature=0
    )
    assert by_ids.choices[0].text == run.text


def test_a_seed_repeats_and_choices_differ(client: Any) -> None:
    ask = {"model": "tiny", "prompt": ["the of", "a"], "max_tokens": 10, "seed": 3, "n": 2}
    first, again = client.completions.create(**ask), client.completions.create(**ask)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert texts[0] != texts[1]
    alone = client.completions.create(model="tiny", prompt="the of", max_tokens=10, seed=3)
    assert alone.choices[0].text == texts[0]


def test_streams_give_the_same_text(client: Any) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "the of", "max_tokens": 12, "seed": 9, "temperature": 0.8}
    whole = client.completions.create(**ask).choices[0]
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.text
    assert chunks[-2].choices[0].finish_reason == whole.finish_reason
    assert chunks[-1].usage.completion_tokens == len(chunks) - 2
    chat: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the of"}],
        "max_tokens": 9,
        "seed": 1,
    }
    text = client.chat.completions.create(**chat).choices[0].message.content
    parts = list(client.chat.completions.create(**chat, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts) == text


def test_choices_are_written_together(server: Server, client: Any) -> None:
    """Chunks of several choices come in turns, each begins as choices do, and they make the texts of one answer."""
    chat: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the of"}],
        "max_tokens": 9,
        "seed": 1,
        "n": 3,
    }
    whole = [choice.message.content for choice in client.chat.completions.create(**chat).choices]
    texts, order = ["", "", ""], []
    for part in client.chat.completions.create(**chat, stream=True):
        choice = part.choices[0]
        if choice.delta.role == "assistant":
            assert choice.index not in order
        order.append(choice.index)
        texts[choice.index] += choice.delta.content or ""
    assert texts == whole
    assert order != sorted(order)
    logs = post(server, "/v1/completions", prompt="the of", max_tokens=4, n=2, logprobs=1, seed=1).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in logs["choices"]] == [4, 4]


def test_texts_obey_grammars(server: Server, client: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    chat: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 40,
        "seed": 1,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for choice in client.chat.completions.create(**chat, response_format=form, n=3).choices:
        assert choice.finish_reason == "stop"
        assert isinstance(json.loads(choice.message.content)["ok"], bool)
    text = client.chat.completions.create(**chat, response_format={"type": "json_object"}).choices[0].message.content
    assert text.startswith("{")
    plain = client.chat.completions.create(**chat, response_format={"type": "text"}).choices[0].message.content
    assert plain == client.chat.completions.create(**chat).choices[0].message.content

    def asked(**body: Any) -> Any:
        return post(server, "/v1/completions", prompt="a", max_tokens=30, seed=2, **body).json()

    assert asked(grammar='root ::= "yes" | "no"')["choices"][0]["text"] in ("yes", "no")
    assert json.loads(asked(json_schema=schema)["choices"][0]["text"]).keys() == {"ok"}
    for body, said in (
        ({"grammar": "root ::= foo"}, "Rule 'foo' not found"),
        ({"grammar": 'root ::= "yes"', "json_schema": schema}, "give one of them"),
        ({"json_schema": {"type": "strange"}}, "the JSON schema is not understood"),
        ({"response_format": {"type": "json_schema"}}, "response_format has no json_schema.schema"),
        ({"response_format": {"type": "strange"}}, "response_format.type"),
    ):
        for more in ({}, {"stream": True}):
            answer = post(server, "/v1/completions", prompt="a", **body, **more)
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]


def test_raw_streams_end_with_done(server: Server) -> None:
    answer = post(server, "/v1/completions", prompt="a", max_tokens=3, stream=True, temperature=0)
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_stop_strings(client: Any) -> None:
    text = client.completions.create(model="tiny", prompt="the of", max_tokens=20, temperature=0).choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(model="tiny", prompt="the of", max_tokens=20, temperature=0, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


def test_log_probabilities_are_true(client: Any, model: LlamaModel) -> None:
    out = client.completions.create(model="tiny", prompt="the of", max_tokens=6, temperature=0, logprobs=3).choices[0]
    rows = model.parts.spec.rows.float32().astype(np.float64)
    for i, step in enumerate(model.generate("the of", 6)):
        logits = rows @ step.state.astype(np.float64)
        true = logits - np.logaddexp.reduce(logits)
        assert abs(out.logprobs.token_logprobs[i] - true[step.token]) <= 1e-3
        assert sorted(out.logprobs.top_logprobs[i].values())[-1] == out.logprobs.token_logprobs[i]
        best = np.sort(true)[::-1][:3]
        assert np.abs(np.sort(list(out.logprobs.top_logprobs[i].values()))[::-1] - best).max() <= 1e-3
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=4, logprobs=True, top_logprobs=2
    )
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [2] * 4


def test_biases_move_and_ban(client: Any, model: LlamaModel) -> None:
    def ids(**more: Any) -> str:
        return client.completions.create(model="tiny", prompt="the of", max_tokens=5, **more).choices[0].text

    wanted = model.vocabulary.encode("word7", begin=False)[-1]
    first = model.generate("the of", 1).run().ids[0]
    assert model.generate("the of", 3, bias={wanted: 1000.0}).run().ids == [wanted] * 3
    assert first not in model.generate("the of", 8, bias={first: -np.inf}).run().ids
    assert model.generate("the of", 4, bias={wanted: 0.0}).run().ids == model.generate("the of", 4).run().ids
    keyed = {"temperature": 1.0, "seed": 4}
    assert (
        model.generate("a", 9, bias={wanted: 0.0, 70: 0.0}, **keyed).run().ids
        == model.generate("a", 9, **keyed).run().ids
    )
    assert ids(temperature=0, logit_bias={str(wanted): 100}) != ids(temperature=0, logit_bias={str(first): -100})


def test_errors_are_objects_without_paths(server: Server, client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt=[5] * 200)
    for path, body, status in (
        ("/v1/completions", {}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": [99999]}, 400),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400),
        ("/v1/completions", {"prompt": "a", "temperature": "NaN"}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1000}, 400),
        ("/v1/completions", {"prompt": "a", "n": 100}, 400),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1.0}, "top_p": 0.5, "max_tokens": 2}, 400),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1.0}}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "a"}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
        ("/v1/nothing", {}, 404),
    ):
        answer = post(server, path, **body)
        assert answer.status_code == status, (body, answer.text)
        error = answer.json()["error"]
        assert error["message"]
        assert "Traceback" not in answer.text
        assert "/" not in error["message"].replace("/v1/nothing", "")
    deep = b'{"prompt": "a", "json_schema": ' + b'{"items":' * 50000 + b"{}" + b"}" * 50001
    for content in (b"{", deep):
        answer = httpx.post(server.url + "/v1/completions", content=content, headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    assert httpx.get(server.url + "/v1/completions", headers={"Authorization": f"Bearer {KEY}"}).status_code == 405


def test_keys_and_sizes(server: Server) -> None:
    assert post(server, "/v1/completions", key=None, prompt="a").status_code == 401
    assert post(server, "/v1/completions", key="sesam", prompt="a").status_code == 401
    assert httpx.get(server.url + "/v1/models").status_code == 401
    assert httpx.get(server.url + "/health").json()["status"] == "ok"
    assert post(server, "/v1/completions", prompt="a" * 2_000_000).status_code == 413

    def parts() -> Iterator[bytes]:
        for _ in range(300):
            yield b"a" * 10_000

    answer = httpx.post(server.url + "/v1/completions", content=parts(), headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 413


def resident() -> int:
    """Bytes of memory that this process has, 0 where that is not known."""
    state = Path("/proc/self/statm")
    return int(state.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if state.exists() else 0


def test_many_clients_some_rude(server: Server, model: LlamaModel) -> None:
    """200 requests of 16 clients: good ones get the text that they get alone, whoever else is cancelled or wrong."""
    alone = {seed: model.generate("the of", 6, temperature=1.0, seed=seed).run().text for seed in range(10)}
    wrong: list[str] = []
    served = 0

    async def one(client: httpx.AsyncClient, i: int) -> None:
        nonlocal served
        headers = {"Authorization": f"Bearer {KEY}"}
        ask = {"prompt": "the of", "max_tokens": 6, "seed": i % 10}
        if i % 10 == 3:  # leaves after the first token
            async with client.stream(
                "POST", "/v1/completions", json={**ask, "stream": True, "max_tokens": 60}, headers=headers
            ) as r:
                async for _ in r.aiter_lines():
                    break
            return
        if i % 10 == 7:
            answer = await client.post("/v1/completions", content=b'{"prompt": ', headers=headers)
            if answer.status_code != 400:
                wrong.append(f"malformed: {answer.status_code}")
            return
        if i == 100:
            answer = await client.post("/v1/completions", json={"prompt": "x" * 3_000_000}, headers=headers)
            if answer.status_code != 413:
                wrong.append(f"huge: {answer.status_code}")
            return
        answer = await client.post("/v1/completions", json=ask, headers=headers)
        if answer.status_code != 200 or answer.json()["choices"][0]["text"] != alone[i % 10]:
            wrong.append(f"{i}: {answer.status_code} {answer.text[:200]}")
        served += 1

    async def everyone() -> None:
        gate = asyncio.Semaphore(16)

        async def guarded(client: httpx.AsyncClient, i: int) -> None:
            async with gate:
                await one(client, i)

        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            await asyncio.gather(*(guarded(client, i) for i in range(200)))

    asyncio.run(everyone())
    before = resident()
    asyncio.run(everyone())
    assert wrong == []
    assert served >= 2 * 150
    assert resident() - before < 16 << 20  # memory is flat
    text = httpx.get(server.url + "/metrics").text
    assert "csv_decode_tokens_total" in text
    tokens = float(next(line for line in text.splitlines() if line.startswith("csv_decode_tokens_total")).split()[1])
    proved = float(
        next(line for line in text.splitlines() if line.startswith("csv_decode_certified_tokens_total")).split()[1]
    )
    assert tokens == proved >= 6 * 150


def test_more_than_may_wait_are_told_so(model: LlamaModel) -> None:
    server = Server(model, limits=Limits(waiting=1))

    async def flood() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            ask = {"prompt": "the of", "max_tokens": 60, "seed": 1}
            answers = await asyncio.gather(*(client.post("/v1/completions", json=ask) for _ in range(12)))
        return [answer.status_code for answer in answers]

    try:
        statuses = asyncio.run(flood())
        assert set(statuses) == {200, 503}
        assert post(server, "/v1/completions", key=None, prompt="a", max_tokens=2).status_code == 200
    finally:
        server.close()


def test_the_page_and_its_steps(server: Server, model: LlamaModel) -> None:
    page = httpx.get(server.url + "/")
    assert "tiny" in page.text
    assert "{{" not in page.text
    answer = post(server, "/steps", prompt="the of", max_tokens=5)
    steps = [json.loads(line) for line in answer.text.splitlines()]
    run = model.generate("the of", 5).run()
    assert [step["id"] for step in steps] == run.ids
    for step in steps:
        assert step["certified"]
        assert step["top"][0]["id"] == step["id"]
        assert step["margin"] == pytest.approx(step["top"][0]["logit"] - step["top"][1]["logit"])
        assert 0 < step["rows_scored"] <= step["rows"] == 600


@pytest.mark.slow
def test_the_page_in_a_browser(server: Server, model: LlamaModel, tmp_path: Path) -> None:
    """Chromium writes a text, shows its proofs, and says what is wrong with a wrong key."""
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    binary, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-component-update"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        browser.get(server.url + "/")
        wait = WebDriverWait(browser, 60)
        find = browser.find_element
        find(By.ID, "prompt").clear()
        find(By.ID, "prompt").send_keys("the of")
        find(By.ID, "tokens").clear()
        find(By.ID, "tokens").send_keys("6")
        find(By.ID, "go").click()
        wait.until(lambda _: find(By.ID, "problem").text)
        assert "API key" in find(By.ID, "problem").text
        find(By.ID, "key").send_keys(KEY)
        find(By.ID, "go").click()
        wait.until(lambda _: find(By.ID, "count").text == "6")
        run = model.generate("the of", 6).run()
        assert find(By.ID, "text").get_attribute("textContent") == "the of" + run.text
        assert find(By.ID, "certified").text == "6"
        rows = browser.find_elements(By.CSS_SELECTOR, "#steps tr")
        assert [row.find_elements(By.TAG_NAME, "td")[1].text for row in rows] == ["proved"] * 6
        assert not find(By.ID, "problem").text
        browser.save_screenshot(str(tmp_path / "page.png"))
        errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert all("401" in entry["message"] or "favicon" in entry["message"] for entry in errors), errors
    finally:
        browser.quit()
