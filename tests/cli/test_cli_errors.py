"""The command line at its edges: what fails does so early and in one short line, and nothing foreign is printed."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from paths import ROOT
from test_cli import DRAFT, PROMPT, error_line

import hf_specdec
from hf_specdec.cli import main, one_line, options, shortened
from hf_specdec.core.folders import cache_folder
from hf_specdec.jsonl import read_rows

DEEP = "[" * 100_000
NGRAM = '{"method": "ngram"}'


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model fails the test: the error must have come before."""

    def load(*args, **kwargs):
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)


COMMANDS = {
    "bench": ("bench", "tiny", "--speculative-config", NGRAM),
    "eval": ("eval", "tiny-medusa", "--target", "tiny", "--prompts", str(options.BUNDLED_PROMPTS)),
    "calibrate": ("calibrate", "tiny", "--speculative-config", DRAFT),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", ["no/such/folder/report.json", "."])
def test_a_report_that_cannot_be_written_is_found_first(capsys, no_model, tmp_path, command, where):
    line = error_line(capsys, *COMMANDS[command], "--json", str(tmp_path / where))
    assert "--json" in line and str(tmp_path) in line


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("content", [None, "an earlier report"])
def test_a_report_that_a_folder_refuses_is_found_first(capsys, monkeypatch, no_model, tmp_path, command, content):
    """Where the folder's permissions say nothing: for root, on file systems that are full or read-only, in /proc."""
    file, opened = tmp_path / "report.json", os.open

    def refuse(path, *args, **kwargs):
        if os.fspath(path) == str(file):
            raise PermissionError(13, "Permission denied", str(file))
        return opened(path, *args, **kwargs)

    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(options.os, "open", refuse)
    line = error_line(capsys, *COMMANDS[command], "--json", str(file))
    assert f"--json {file}: cannot be written: permission denied" in line


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc")
def test_no_report_in_proc(capsys, no_model):
    line = error_line(capsys, *COMMANDS["bench"], "--json", "/proc/x.json")
    assert "--json /proc/x.json: cannot be written: no such file or directory" in line


def test_the_check_of_a_report_leaves_no_trace(tmp_path):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("an earlier report")
    link = tmp_path / "link.json"
    link.symlink_to(new)
    for file in (new, old, link):
        options.check_output_file(str(file), "--json")
    assert link.is_symlink() and not new.exists() and old.read_text() == "an earlier report"


def test_a_plot_that_cannot_be_written_is_found_first(capsys, no_model, tmp_path):
    line = error_line(capsys, *COMMANDS["eval"], "--plot", str(tmp_path / "no" / "plot.png"))
    assert "--plot" in line and "no such folder" in line


@pytest.mark.parametrize(
    "argv",
    [
        ("generate", "tiny", "--prompt", "x"),
        ("bench", "tiny", "--speculative-config", NGRAM),
        ("train", "draft_model", "--target", "tiny", "--data", __file__, "--output", "/nowhere/x", "--regenerate"),
    ],
    ids=lambda argv: argv[0],
)
def test_a_bad_configuration_is_found_first(capsys, no_model, argv):
    assert "ngram" in error_line(capsys, *argv, "--speculative-config", '{"method": "ngrm"}')


def test_an_encoder_decoder_model_is_refused_before_it_is_loaded(capsys, no_model, tmp_path):
    transformers.AutoConfig.for_model("bart").save_pretrained(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "text": "b"}\n')
    line = error_line(capsys, "generate", str(tmp_path), "--prompt", "a")
    assert "is an encoder-decoder model: use hf-specdec serve, or generate()" in line
    line = error_line(
        capsys, "train", "eagle3", "--target", str(tmp_path), "--data", str(data), "--output", str(tmp_path / "x")
    )
    assert "is an encoder-decoder model: no drafter can be trained for such a target yet" in line


def test_files_that_begin_with_a_byte_order_mark(capsys, tmp_path):
    """As Windows' editors write them."""
    rows, text, config = tmp_path / "rows.jsonl", tmp_path / "text.txt", tmp_path / "config.json"
    rows.write_text(json.dumps({"prompt": PROMPT}) + "\n", encoding="utf-8-sig")
    text.write_text(PROMPT, encoding="utf-8-sig")
    config.write_text(NGRAM, encoding="utf-8-sig")
    assert read_rows(rows, "prompt")[0]["prompt"] == PROMPT
    assert read_rows(text, "prompt")[0]["prompt"] == PROMPT
    assert hf_specdec.parse_config(str(config)).method == "ngram"
    assert hf_specdec.parse_config("\ufeff" + NGRAM).method == "ngram"


@pytest.mark.parametrize(
    ("option", "content", "says"),
    [
        ("--response-template", b'{"a": ', "not JSON (Expecting value"),
        ("--response-template", DEEP.encode(), "JSON that is nested too deeply"),
        ("--response-template", b"[1]", "expected a JSON object"),
        ("--response-template", b"\xff", "not UTF-8 text"),
        ("--chat-template", b"\xff", "not UTF-8 text"),
    ],
)
def test_a_template_that_cannot_be_read_is_named(capsys, tmp_path, option, content, says):
    pytest.importorskip("fastapi")
    file = tmp_path / "template"
    file.write_bytes(content)
    line = error_line(capsys, "serve", "tiny", option, str(file))
    assert f"{option} {file}: {says}" in line


@pytest.mark.parametrize("port", ["99999999", "-1", "http", "65536"])
def test_a_port_that_is_none(capsys, port):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "tiny", f"--port={port}"])
    line = capsys.readouterr().err
    assert ended.value.code == 2 and f"must be a port from 0 to 65535, not '{port}'" in line and line.count("\n") == 1


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("127.0.0.1", "--port|another port"),
        ("no-such-host.invalid", "name or address of this machine"),
        ("x" * 100, "name or address of this machine"),
        ("192.0.2.7", "name or address of this machine"),  # of documentation: no machine has it
    ],
)
def test_an_address_that_cannot_be_served_is_found_first(capsys, monkeypatch, host, says):
    run = pytest.importorskip("hf_specdec.serve.http.run")
    monkeypatch.setattr(run, "EngineProcess", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = error_line(capsys, "serve", "tiny", "--host", host, "--port", str(port))
    assert re.search(says, line) and f"{host}:{port}" in line and "Errno" not in line


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", ""])
def test_one_server_for_an_address(host):
    """Also before the first has answered anything."""
    from hf_specdec.serve.http.address import listen

    try:
        first = listen(host, 0)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    try:
        ports = {each.getsockname()[1] for each in first}
        assert len(ports) == 1
        with pytest.raises(OSError, match="in use"):
            listen(host, *ports)
        for each in first:
            assert not each.get_inheritable()
            socket.create_connection(each.getsockname()[:2]).close()
    finally:
        for each in first:
            each.close()
    for each in listen(host, *ports):  # at once: connections of the last server do not hold the port
        each.close()


def test_home_folders_that_no_shell_has_expanded(capsys, monkeypatch, tmp_path):
    """In quotes and after "--option=" shells leave "~" as it is, and nothing expands it in JSON."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(hf_specdec.bundled("tiny"))
    (tmp_path / "prompt.txt").write_text(PROMPT)
    (tmp_path / "config.json").write_text('{"method": "draft_model", "model": "~/model"}')
    flags = [
        "--prompt-file=~/prompt.txt",
        "--speculative-config=~/config.json",
        "--max-new-tokens",
        "4",
        "--dtype",
        "float32",
    ]
    assert main(["generate", "~/model", *flags]) == 0, capsys.readouterr().err
    assert hf_specdec.parse_config("~/config.json").method == "draft_model"
    assert hf_specdec.parse_config({"model": "~/model"}).method == "draft_model"
    monkeypatch.setenv("HF_SPECDEC_CACHE", "~/cache")
    assert cache_folder() == tmp_path / "cache"


def test_prompts_from_stdin_may_begin_with_one(monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff" + PROMPT))
    assert options.read_prompts("-")[0]["prompt"] == PROMPT


def test_json_that_is_nested_too_deeply(capsys, no_model, tmp_path):
    prompts, config = tmp_path / "prompts.jsonl", tmp_path / "config.json"
    prompts.write_text(DEEP)
    config.write_text(DEEP)
    for argv in (
        ("generate", "tiny", "--prompt-file", str(prompts)),
        ("generate", "tiny", "--prompt", "x", "--speculative-config", str(config)),
        ("eval", "tiny-medusa", "--target", "tiny", "--speculative-config", DEEP),
    ):
        line = error_line(capsys, *argv)
        assert "nested too deeply" in line and len(line) < 400, line[:500]


def test_long_values_are_not_echoed_whole(capsys, no_model, tmp_path):
    long = "x" * 5000
    for argv in (
        ("generate", "tiny", "--prompt", "x", "--speculative-config", long),
        ("generate", "tiny", "--prompt", "x", "--speculative-config", json.dumps({"method": long})),
        ("generate", "tiny", "--prompt", "x", "--speculative-config", json.dumps({"method": "ngram", long: 1})),
        ("generate", "tiny", "--prompt", "x", "--speculative-config", json.dumps({"method": "word " * 1000})),
        ("generate", "tiny", "--prompt", "x", "--max-new-tokens", long),
        ("generate", "tiny", "--prompt-file", long),
        ("models", long),
        (long,),
    ):
        line = error_line(capsys, *argv)
        assert len(line) < 1000 and "…" in line, line[:300]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (IsADirectoryError(21, "Is a directory", "/tmp/x"), "/tmp/x: is a directory."),
        (PermissionError(13, "Permission denied", "/root/x"), "/root/x: permission denied."),
        (OSError(28, "No space left on device"), "no space left on device."),
        (OSError("tiny2 is no folder"), "tiny2 is no folder"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
    ],
)
def test_errors_of_the_system_are_sentences(error, says):
    assert says in one_line(error)
    assert "[Errno" not in one_line(error)


# ---- in processes of their own --------------------------------------------------------------------------------------

START = "import sys; from hf_specdec.cli import main; sys.exit(main())"


def process(*argv, **options):
    return subprocess.Popen(
        [sys.executable, "-c", START, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "argv",
    [("models",), *(pytest.param(argv, marks=pytest.mark.slow) for argv in (("models", "--markdown"), ("--help",)))],
    ids=" ".join,
)
def test_a_reader_that_has_seen_enough_is_no_error(argv):
    with process(*argv) as command:
        command.stdout.close()  # before a line is written
        assert (command.stderr.read(), command.wait()) == ("", 0)


@pytest.mark.slow
def test_torchao_is_not_heard():
    pytest.importorskip("torchao")
    with process("generate", "tiny", "--prompt", PROMPT, "--max-new-tokens", "4") as command:
        out, err = command.communicate()
    assert command.returncode == 0 and out.strip(), err
    assert len(err.strip().splitlines()) == 1 and "tokens/s" in err, err


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torchao's libraries load")
def test_torchao_is_heard_with_debug():
    pytest.importorskip("torchao")
    with process("models", "none", "--debug") as command:
        _, err = command.communicate()
    assert command.returncode == 0 and "torchao" in err


def test_only_values_are_shortened(capsys):
    """An apostrophe, or the end of one quoted value and the beginning of the next, is no quotation."""
    words = (
        "method ('medusa' then, 'hydra' now), " + "a setting (1 then, 2 now), " * 12 + "the target's, or the draft's"
    )
    assert shortened(words) == words
    assert shortened(f"not {'x' * 300!r}.") == "not 'xxx" + "x" * 76 + "…."


def test_cards_that_are_not_the_users_are_not_changed(capsys, no_model, tmp_path):
    """Nor is a card looked for after minutes of measuring."""
    folder = hf_specdec.bundled("tiny-medusa")
    for head in ("tiny-medusa", folder):
        line = error_line(capsys, "eval", head, "--target", "tiny", "--update-card")
        assert "--update-card" in line and "bundled head" in line
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("# Mine")
    assert "no model card" in error_line(capsys, "eval", str(copy), "--target", "tiny", "--update-card")


def test_interrupted_while_it_imports(tmp_path):
    """One line, whatever is being imported, and the exit code of interrupted commands."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(hf_specdec.__file__).parents[1])]),
    }
    command = [sys.executable, "-m", "hf_specdec", "env"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "hf-specdec env: interrupted\n")
