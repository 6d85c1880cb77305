"""Owns the call of llama.cpp's conversion program for a model without its vocabulary.

Called as `PYTHON llamacpp_convert.py LLAMA_CPP MODEL GGUF TYPE`, by llamacpp.sh. The program refuses tokenizers that it
does not know, as those of made-up checkpoints are. Engines are given token ids here, so that none is needed.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any


def without_vocabulary(model: Any) -> None:
    """Write, for a tokenizer, only how many tokens there are."""
    model.gguf_writer.add_tokenizer_model("none")
    model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])


def main(sources: Path, model: Path, gguf: Path, kind: str) -> None:
    """Convert the checkpoint `model` to the file `gguf` with weights of a kind: bf16, f16 or f32."""
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    conversion = importlib.import_module("conversion")
    hparams = conversion.ModelBase.load_hparams(model, False)
    architecture = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
    conversion.get_model_class(architecture).set_vocab = without_vocabulary
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outfile", str(gguf), "--outtype", kind]
    runpy.run_path(str(sources / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
