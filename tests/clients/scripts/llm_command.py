"""Simon Willison's `llm`, configured as its documentation says: extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {os.environ['MODEL']}\n"
        f"  api_base: {os.environ['OPENAI_BASE_URL']}\n  api_key_name: ours\n"
    )
    Path(folder, "keys.json").write_text(json.dumps({"ours": os.environ["OPENAI_API_KEY"]}))
    command = [str(Path(sys.executable).with_name("llm")), "-m", "ours", "-o", "max_tokens", "8", "-o", "seed", "1"]
    environment = {**os.environ, "LLM_USER_PATH": folder}
    texts = [
        subprocess.check_output([*command, *more, "Say a few words."], env=environment, text=True)
        for more in ([], ["--no-stream"])
    ]
print(json.dumps({"stream": {"text": texts[0].strip()}, "text": texts[1].strip()}))
