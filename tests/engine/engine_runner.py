"""Run one vLLM engine in a process of its own: a JSON job on the command line's file, a JSON result in another.

    python engine_runner.py JOB RESULT

Job: `engine` (arguments of `vllm.LLM`), `backends` (class paths of attention backends by vLLM's name), `prompts` (lists of
token ids), `sampling` (arguments of `SamplingParams`, or a list, one for each prompt), `together` (numbers of prompts that are
handed over at a time; empty: all at once), `count_compilations`, `then` (what is done after that: a list of names from
`ACTIONS` with arguments; after each, the prompts are answered again).
Result: `answers`, per prompt `prompt_logprobs` and `logprobs`, each a list over positions of {token id: log-probability},
`token_ids` generated, `text`, and `cached_tokens` of the prompt; `later`, a list of such answers for each of `then`;
`addresses`, for the start and each of `then`, the weights' in each worker by name; `compilations` of our kernels in the
worker, once the engine has started and at the end, if they are to be counted; `accepted` tokens of a draft.
"""

import json
import os
import sys
from pathlib import Path

import forked


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


def addresses(worker) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in worker.model_runner.get_model().named_parameters()}


def reload_weights(llm, folder: str) -> None:
    """As trainers do who write checkpoints."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    llm.reset_prefix_cache()


def save_state(llm, folder: str) -> None:
    llm.collective_rpc("save_sharded_state", kwargs={"path": folder})


def sleep_and_wake(llm, level: int, folder: str | None = None) -> None:
    """Level 1 keeps the weights in the CPU's memory; level 2 drops them, so they come from `folder`."""
    llm.sleep(level=level)
    if level == 1:
        llm.wake_up()
        return
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    llm.wake_up(tags=["kv_cache"])


def finish_again(llm) -> None:
    """vLLM's last step of loading, once more."""
    llm.collective_rpc(_finish_again)


def _finish_again(worker) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    runner = worker.model_runner
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        process_weights_after_loading(runner.get_model(), runner.model_config, runner.device)


def save_codes(llm, folder: str) -> None:
    """Codes and scales that row-parallel layers make of one whole input, of which a rank gets its part: FOLDER/RANK.pt."""
    os.makedirs(folder)
    llm.collective_rpc(_save_codes, args=(folder,))


def _save_codes(worker, folder: str) -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    class Quantizers(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.w8a8.quantize.default, torch.ops.w8a8.quantize_with_amax.default):
                self.seen = tuple(tensor.cpu() for tensor in result)
            return result

    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    model, saved = worker.model_runner.get_model(), {}
    for name, layer in model.named_modules():
        if name.endswith((".o_proj", ".down_proj")):
            x = torch.randn(33, layer.input_size, generator=torch.Generator().manual_seed(0))
            x[2, -3] = 500.0
            part = x.to(worker.device, torch.bfloat16).chunk(ranks, dim=1)[rank].contiguous()
            with torch.no_grad(), Quantizers() as quantizers:
                layer.quant_method.apply(layer, part)
            saved[name] = quantizers.seen
    torch.save(saved, Path(folder, f"{rank}.pt"))


ACTIONS = {action.__name__: action for action in (reload_weights, save_state, save_codes, sleep_and_wake, finish_again)}


def accepted_tokens(llm) -> int:
    """Draft tokens that the target has accepted; 0 without a draft, or where nobody counts."""
    if llm.llm_engine.vllm_config.speculative_config is None or not llm.llm_engine.log_stats:
        return 0
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")


def run_forked(job_file: str, result_file: str, log_file: str, environment: dict[str, str]) -> None:
    """`main` in a process that `forked` has made."""
    forked.take_environment(environment)
    os.chdir(Path(job_file).parent)
    os.setsid()  # so that its workers can be stopped with it
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    main(job_file, result_file)


def main(job_file: str, result_file: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    job = json.loads(Path(job_file).read_text())
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    each = job["sampling"] if isinstance(job["sampling"], list) else [job["sampling"]] * len(prompts)
    sampling = [SamplingParams(flat_logprobs=True, **arguments) for arguments in each]
    for name, path in job["backends"].items():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum[name], path)
    llm = LLM(**job["engine"])
    counted = [compilations(llm)] if job["count_compilations"] else []

    def ask(adapter: LoRARequest | None = None) -> list[dict]:
        outputs = []
        for n in job["together"] or [len(prompts)]:
            part = slice(len(outputs), len(outputs) + n)
            outputs += llm.generate(prompts[part], sampling[part], use_tqdm=False, lora_request=adapter)
        return [
            {
                "prompt_logprobs": positions(output.prompt_logprobs),
                "logprobs": positions(output.outputs[0].logprobs),
                "token_ids": list(output.outputs[0].token_ids),
                "text": output.outputs[0].text,
                "cached_tokens": output.num_cached_tokens or 0,
            }
            for output in outputs
        ]

    answers, later, where = ask(), [], []
    if job["then"]:
        where.append(llm.collective_rpc(addresses))
    for i, (name, *arguments) in enumerate(job["then"]):
        if name == "adapter":
            later.append(ask(LoRARequest(str(i), i + 1, *arguments)))
            continue
        if name != "again":
            ACTIONS[name](llm, *arguments)
        later.append(ask())
        where.append(llm.collective_rpc(addresses))
    if job["count_compilations"]:
        counted.append(compilations(llm))
    result = {"answers": answers, "later": later, "addresses": where, "compilations": counted}
    Path(result_file).write_text(json.dumps(result | {"accepted": accepted_tokens(llm)}))
    llm.llm_engine.engine_core.shutdown()
    # An ordinary exit of vLLM's CPU build aborted in some runs on a busy machine ("terminate called without an active
    # exception"), long after the answers were there.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
