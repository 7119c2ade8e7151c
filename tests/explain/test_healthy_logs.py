"""The output of healthy runs, builds and tests is not a failure, nor is a warning that stops nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from ddpsafe._explain.reader import explain_text

LOGS: Final[dict[str, str]] = {
    "nccl_info": """\
n1:101:101 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
n1:101:101 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
n1:101:101 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)
n1:101:101 [0] NCCL INFO NET/Plugin: Plugin load returned 2 : libnccl-net.so: cannot open shared object file: No such file or directory : when loading libnccl-net.so
n1:101:101 [0] NCCL INFO Failed to open libibverbs.so[.1]
n1:101:210 [0] NCCL INFO NET/IB : mlx5_0:1 Got non-fatal async event: GID table change(18)
n1:101:101 [0] NCCL INFO NET/Plugin: Using internal network plugin.
n1:101:101 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
n1:101:101 [0] NCCL INFO NET/IB : No device found.
n1:101:101 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
n1:101:101 [0] NCCL INFO NCCL_IB_GID_INDEX set by environment to 3.
n1:101:101 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.
n1:101:210 [0] NCCL INFO NVLS multicast support is not available on dev 0
n1:101:210 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1
n1:101:210 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0. You can repress this message with NCCL_IGNORE_DISABLED_P2P=1.
n1:101:210 [0] NCCL INFO GPU Direct RDMA Disabled for HCA 0 'mlx5_0'
n1:101:210 [0] NCCL INFO MNNVL busId 0x1a000 fabric UUID 0.0 cliqueId 0x0 state 3 healthMask 0x0
n1:101:210 [0] NCCL INFO TUNER/Plugin: Failed to find ncclTunerPlugin_v2 symbol.
n1:101:210 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so libnccl-tuner.so. Using internal tuner plugin.
n1:101:210 [0] NCCL INFO dlvsym failed on ibv_get_device_list - /lib/libibverbs.so: undefined symbol: ibv_get_device_list, version IBVERBS_1.1 version IBVERBS_1.1
n1:101:210 [0] NCCL INFO Could not enable P2P between dev 0(=1a000) and dev 1
n1:101:210 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct
n1:101:210 [0] NCCL INFO Connected all rings
n1:101:210 [0] NCCL INFO comm 0x7f rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 1a000 commId 0x1 - Init COMPLETE
n1:101:210 [0] NCCL INFO [Service thread] Connection closed by localRank 0
n1:101:101 [0] NCCL INFO comm 0x7f rank 0 nranks 8 cudaDev 0 busId 1a000 - Abort COMPLETE
n1:101:101 [0] NCCL INFO comm 0x7f rank 0 nranks 8 cudaDev 0 busId 1a000 - Destroy COMPLETE
n1:101:101 [0] NCCL INFO misc/socket.cc:47 -> 3
n1:101:101 [0] NCCL INFO misc/socket.cc:752 -> 3
n1:101:101 [0] NCCL INFO misc/socket.cc:428 -> 3
""",
    "decoders": """\
Epoch: [3][ 40/5005] Time 0.31 Data 0.02 Loss 2.31
Corrupt JPEG data: 4 extraneous bytes before marker 0xd9
2026-04-05 18:59:27.749865: E tensorflow/stream_executor/cuda/cuda_driver.cc:806] failed to allocate 28.82G (30950542336 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory
libpng warning: iCCP: known incorrect sRGB profile
[h264 @ 0x5581] mmco: unref short failure
[h264 @ 0x5581] error while decoding MB 30 0, bytestream -5
Error: could not read image /data/a.jpg, skipping it
WARNING: failed to load video 33.mp4, another one is taken
/usr/lib/python3.10/multiprocessing/resource_tracker.py:237: UserWarning: resource_tracker: '/mp-1': [Errno 2] No such file or directory
Epoch: [3][ 50/5005] Time 0.30 Data 0.02 Loss 2.30
""",
    "torchrun_warn": """\
W1122 10:00:00.000000 1234 torch/distributed/run.py:793]
W1122 10:00:00.000000 1234 torch/distributed/run.py:793] *****************************************
W1122 10:00:00.000000 1234 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded, please further tune the variable for optimal performance in your application as needed.
W1122 10:00:00.000000 1234 torch/distributed/run.py:793] *****************************************
[W1122 10:00:03.1 socket.cpp:697] [c10d] The client socket has failed to connect to [node-0]:29500 (errno: 111 - Connection refused).
[I1122 10:00:04.1 ProcessGroupNCCL.cpp:905] [PG 0 Rank 0] ProcessGroupNCCL initialization options: size: 8, global rank: 0, TIMEOUT(ms): 600000, USE_HIGH_PRIORITY_STREAM: 0, SPLIT_FROM: 0
[I1122 10:00:04.1 ProcessGroupNCCL.cpp:914] [PG 0 Rank 0] ProcessGroupNCCL environments: NCCL version: 2.20.5, TORCH_NCCL_ASYNC_ERROR_HANDLING: 3, TORCH_NCCL_DUMP_ON_TIMEOUT: 0, TORCH_NCCL_ENABLE_TIMING: 0
epoch 0 step 10 loss 2.1 grad_norm 1.2
epoch 0 step 20 loss 2.0 grad_norm 1.1
saved checkpoint to /ckpt/10.pt
""",
    "hf": """\
2024-05-01 10:00:01.123456: I tensorflow/core/platform/cpu_feature_guard.cc:193] This TensorFlow binary is optimized with oneAPI Deep Neural Network Library (oneDNN)
2024-05-01 10:00:02.000000: W tensorflow/compiler/xla/stream_executor/platform/default/dso_loader.cc:64] Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared object file: No such file or directory; LD_LIBRARY_PATH: /usr/local/nvidia/lib
2024-05-01 10:00:02.000000: W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Cannot dlopen some TensorRT libraries.
2024-05-01 10:00:02.1: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9261] Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been registered
2024-05-01 10:00:02.1: E external/local_xla/xla/stream_executor/cuda/cuda_blas.cc:1515] Unable to register cuBLAS factory: Attempting to register factory for plugin cuBLAS when one has already been registered
Some weights of BertForSequenceClassification were not initialized from the model checkpoint at bert-base-uncased and are newly initialized: ['classifier.bias', 'classifier.weight']
You should probably TRAIN this model on a down-stream task to be able to use it for predictions and inference.
huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...
/env/lib/python3.10/site-packages/torch/utils/checkpoint.py:464: UserWarning: torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly.
Using the `WANDB_DISABLED` environment variable is deprecated and will be removed in v5.
wandb: Currently logged in as: someone. Use `wandb login --relogin` to force relogin
wandb: Tracking run with wandb version 0.16.0
wandb: WARNING Path /wandb/ wasn't writable, using system temp directory
{'loss': 1.234, 'grad_norm': 3.2, 'learning_rate': 4.9e-05, 'epoch': 0.02}
{'eval_loss': 0.9, 'eval_error_rate': 0.1, 'eval_runtime': 10.2, 'epoch': 1.0}
 10%|█         | 100/1000 [01:40<15:00,  1.00s/it]
Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0
***** Running training *****
  Num examples = 1,000
  Gradient Accumulation steps = 1
Training completed. Do not forget to share your model on huggingface.co/models =)
""",
    "gloo": """\
[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3
[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3
[rank0]:[W1122 10:00:00.9 ProcessGroup.hpp:180] Warning: destroy_process_group() was not called before program exit
""",
    "handled": """\
2024-05-01 WARNING download attempt 1 failed, retrying in 1 s
2024-05-01 INFO retrying after ConnectionError (attempt 2/5)
2024-05-01 INFO download finished
epoch 1 done
[rank0]: /w/x.py:10: UserWarning: The given NumPy array is not writable
/env/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown
""",
}


def test_output_of_healthy_programs_is_not_a_failure() -> None:
    """Launchers, NCCL, frameworks, pip, compilers and tests, with warnings and words of failures."""
    wrong = [
        f"{name}: {cause.code}, {cause.evidence}"
        for name, log in LOGS.items()
        for cause in explain_text(log)
        if cause.level != "noise"
    ]
    assert not wrong, "\n".join(wrong)


HEALTHY: Final = Path(__file__).with_name("healthy_lines.txt")
"""Lines and whole logs that programs print in runs that do not fail, after a heading for each."""


def _kinds() -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for line in HEALTHY.read_text("utf-8").splitlines():
        if line.startswith("## "):
            kinds[line[3:]] = []
        else:
            kinds[list(kinds)[-1]].append(line)
    return kinds


def test_no_healthy_line_has_a_finding() -> None:
    """NCCL, torchrun, Slurm, apt, pip, wandb, Lightning and more: none at all, not even a notice."""
    lines = [line for lines in _kinds().values() for line in lines]
    assert len(lines) >= 900
    found = [(cause.code, line) for line in lines for cause in explain_text(line)]
    assert not found, found


@pytest.mark.parametrize("kind", _kinds())
def test_healthy_lines_have_no_finding_beside_each_other(kind: str) -> None:
    """A rule that needs two lines does not find them in a healthy run, nor in one that failed for another reason."""
    log = "\n".join(_kinds()[kind])
    assert [cause.code for cause in explain_text(log)] == []
    failed = explain_text(f"{log}\n[rank3]: MemoryError\n")
    assert [(cause.code, cause.rank) for cause in failed] == [("DS-MEM-alloc", 3)]


WARNED: Final = "[W1122 socket.cpp:697] [c10d] The client socket has failed to connect to [node-0]:29500 (errno: 111 - Connection refused).\n"
TORN: Final = "WARNING: not read: EOFError: Ran out of input\nin /tmp/torchinductor_me/fx.json\n"
JOINING: Final = "Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/8\n"
ENDED: Final = "KeyboardInterrupt\n"
LATE: Final = "[W ProcessGroupNCCL.cpp:600] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=10, OpType=ALLREDUCE, NumelIn=5) ran for 1805457 milliseconds before timing out.\n"
PROGRESS: Final = "epoch 0 step 10 loss 2.1\n"


@pytest.mark.parametrize(
    ("log", "codes"),
    [
        (WARNED, ["DS-RDZV-refused"]),
        (WARNED + PROGRESS, []),
        (PROGRESS + WARNED, ["DS-RDZV-refused"]),
        (WARNED + PROGRESS + WARNED, ["DS-RDZV-refused"]),
        (WARNED.replace("[W", "[E") + PROGRESS, ["DS-RDZV-refused"]),
        (WARNED + "MemoryError\n" + PROGRESS, ["DS-MEM-alloc"]),
        (TORN, ["DS-COMPILE-cache-torn"]),
        (TORN + PROGRESS, []),
        (LATE, ["DS-HANG-watchdog"]),
        (LATE + PROGRESS, []),
        (JOINING, []),
        (JOINING + ENDED, ["DS-RDZV-members", "DS-END-interrupted"]),
        (JOINING + "All distributed processes registered. Starting with 8 processes\n", []),
        (
            JOINING + "LOCAL_RANK: 1 - CUDA_VISIBLE_DEVICES: [0,1,2,3]\n" + ENDED,
            ["DS-END-interrupted"],
        ),
    ],
    ids=[
        "alone",
        "goes-on",
        "at-the-end",
        "again",
        "an-error",
        "beside-an-error",
        "of-two-lines",
        "of-two-lines-goes-on",
        "of-the-watchdog",
        "of-the-watchdog-goes-on",
        "joining",
        "joining-until-the-end",
        "joined",
        "joined-on-another-node",
    ],
)
def test_a_warning_followed_by_progress_is_not_a_failure(log: str, codes: list[str]) -> None:
    """Steps that follow show that it stopped nothing; an error always counts."""
    assert [cause.code for cause in explain_text(log)] == codes
