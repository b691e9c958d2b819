"""Run one vLLM engine in a process of its own: a JSON job on the command line's file, a JSON result in another.

    python engine_runner.py JOB RESULT

Job: `engine` (arguments of `vllm.LLM`), `prompts` (lists of token ids), `sampling` (arguments of `SamplingParams`, or a list,
one for each prompt), `together` (numbers of prompts that are handed over at a time; empty: all at once), `count_compilations`.
Result: `answers`, per prompt `prompt_logprobs` and `logprobs`, each a list over positions of {token id: log-probability},
`token_ids` generated, and `text`; `compilations` of our kernels in the worker, once the engine has started and at the end, if
they are to be counted.
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


def compilations(llm) -> int:
    """Kernel variants that the worker has compiled. It must be in this process: VLLM_ENABLE_V1_MULTIPROCESSING=0."""

    def count(worker) -> int:
        import w8a8_kernels

        return w8a8_kernels.compilations()

    (counted,) = llm.collective_rpc(count)
    return counted


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    each = job["sampling"] if isinstance(job["sampling"], list) else [job["sampling"]] * len(prompts)
    sampling = [SamplingParams(flat_logprobs=True, **arguments) for arguments in each]
    llm = LLM(**job["engine"])
    counted = [compilations(llm)] if job["count_compilations"] else []
    outputs = []
    for n in job["together"] or [len(prompts)]:
        part = slice(len(outputs), len(outputs) + n)
        outputs += llm.generate(prompts[part], sampling[part], use_tqdm=False)
    if job["count_compilations"]:
        counted.append(compilations(llm))
    answers = [
        {
            "prompt_logprobs": positions(output.prompt_logprobs),
            "logprobs": positions(output.outputs[0].logprobs),
            "token_ids": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text,
        }
        for output in outputs
    ]
    Path(sys.argv[2]).write_text(json.dumps({"answers": answers, "compilations": counted}))
    llm.llm_engine.engine_core.shutdown()
    # An ordinary exit of vLLM's CPU build aborted in some runs on a busy machine ("terminate called without an active
    # exception"), long after the answers were there.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
