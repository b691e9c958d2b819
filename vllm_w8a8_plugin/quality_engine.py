"""One vLLM engine in a process of its own: python -m vllm_w8a8_plugin.quality_engine JOB SCORES REPORT

JOB is a JSON file: `engine` (arguments of `vllm.LLM`), `prompts` (lists of token ids), `first` (the first position of each
prompt that counts), `kept` (how many tokens to keep at each), and perhaps `progress` (a file that grows by one byte with each
prompt that is done). SCORES becomes the `Scores` of all prompts, one after another, REPORT a JSON file with what the engine
was: `dtype`, `quantization`, `kv_cache_dtype`, `device`.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from vllm_w8a8_plugin.divergence import Scores


def scores_of(flat, first: int) -> Scores:
    """Scores of one prompt.

    Args:
        flat: vLLM's flat prompt log-probabilities: nothing for the first token, then at each position the true token followed
            by the likeliest ones.
        first: the first position that counts.

    Raises:
        ValueError: some log-probabilities are no numbers.
    """
    positions = len(flat.start_indices)
    logprobs = np.asarray(flat.logprobs, dtype=np.float32).reshape(positions - 1, -1)[first - 1 :]
    token_ids = np.asarray(flat.token_ids, dtype=np.int32).reshape(positions - 1, -1)[first - 1 :]
    wrong = ~np.isfinite(logprobs).all(axis=1)
    if wrong.any():
        raise ValueError(f"got NaN or infinite log-probabilities at {wrong.sum()} of {len(wrong)} positions")
    return Scores(logprobs[:, 0], token_ids[:, 1:], logprobs[:, 1:])


def device_name() -> str:
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"CPU ({torch.backends.cpu.get_cpu_capability()})"
    return current_platform.get_device_name()


def main() -> None:
    from vllm import LLM, SamplingParams

    job_file, scores_file, report_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    llm = LLM(**job["engine"], max_logprobs=job["kept"])
    config = llm.llm_engine.model_config
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=min(job["kept"], config.get_vocab_size()),
        flat_logprobs=True,
        detokenize=False,  # else vLLM makes text of every token that it names, which takes longer than the model
    )
    parts = []
    for prompt in job["prompts"]:  # one by one: who meets whom in a batch moves bf16 results
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        parts.append(scores_of(output.prompt_logprobs, job["first"]))
        if "progress" in job:
            with open(job["progress"], "ab") as progress:
                progress.write(b".")
    fields = ("true_logprobs", "token_ids", "logprobs")
    Scores(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields)).save(scores_file)
    report = {
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "kv_cache_dtype": llm.llm_engine.vllm_config.cache_config.cache_dtype,
        "device": device_name(),
    }
    report_file.write_text(json.dumps(report))
    llm.llm_engine.engine_core.shutdown()
    # An ordinary exit of vLLM's CPU build aborts at times, long after the answers are there.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
