"""Run one vLLM engine in a process of its own: a JSON job on the command line's file, a JSON result in another.

    python engine_runner.py JOB RESULT

Job: `engine` (arguments of `vllm.LLM`), `prompts` (lists of token ids), `sampling` (arguments of `SamplingParams`).
Result: per prompt `prompt_logprobs` and `logprobs`, each a list over positions of {token id: log-probability}, `token_ids`
generated, and `text`.
"""

import json
import os
import sys
from pathlib import Path


def positions(logprobs) -> list[dict[int, float]]:
    """A list over positions from vLLM's flat log-probabilities; an unscored position is empty."""
    if logprobs is None:
        return []
    ranges = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    return [dict(zip(logprobs.token_ids[a:b], logprobs.logprobs[a:b], strict=True)) for a, b in ranges]


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**job["engine"])
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in job["prompts"]],
        SamplingParams(flat_logprobs=True, **job["sampling"]),
        use_tqdm=False,
    )
    result = [
        {
            "prompt_logprobs": positions(output.prompt_logprobs),
            "logprobs": positions(output.outputs[0].logprobs),
            "token_ids": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text,
        }
        for output in outputs
    ]
    Path(sys.argv[2]).write_text(json.dumps(result))
    llm.llm_engine.engine_core.shutdown()
    # An ordinary exit of vLLM's CPU build aborted in some runs on a busy machine ("terminate called without an active
    # exception"), long after the answers were there.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
