"""The output of healthy runs, builds and tests is not a failure, nor is a warning that stops nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from ddpsafe._explain.reader import explain_text

LOGS: Final[dict[str, str]] = {
    "lightning": """\
GPU available: True (cuda), used: True
TPU available: False, using: 0 TPU cores
HPU available: False, using: 0 HPUs
Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4
[rank: 1] Seed set to 42
All distributed processes registered. Starting with 4 processes
/env/lib/python3.10/site-packages/lightning/pytorch/trainer/connectors/data_connector.py:425: The 'train_dataloader' does not have many workers which may be a bottleneck. Consider increasing the value of the `num_workers` argument` to `num_workers=63` in the `DataLoader` to improve performance.
/env/lib/python3.10/site-packages/lightning/pytorch/callbacks/model_checkpoint.py:653: Checkpoint directory /ckpt exists and is not empty.
LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1,2,3]
  | Name  | Type | Params
0 | model | ResNet | 11.2 M
Epoch 0: 100%|██████████| 313/313 [00:41<00:00,  7.58it/s, v_num=3, train_loss=1.310]
Epoch 1:  33%|███▎      | 104/313 [00:13<00:27,  7.6it/s]
[rank0]: UserWarning: It is recommended to use `self.log('val_loss', ..., sync_dist=True)` when logging on epoch level in distributed setting
`Trainer.fit` stopped: `max_epochs=2` reached.
""",
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
    "nccl_ofi": """\
n:7:7 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.9.1-aws
n:7:7 [0] NCCL INFO NET/OFI Using Libfabric version 1.20
n:7:7 [0] NCCL INFO NET/OFI Setting FI_EFA_FORK_SAFE environment variable to 1
n:7:7 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
n:7:7 [0] NCCL INFO NET/OFI NIC group 0 device #0 0000:10:1b.0
n:7:7 [0] NCCL INFO NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR
n:7:7 [0] NCCL INFO Using non-device net plugin version 0
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
    "pip": """\
Collecting torch==2.4.0 (from -r requirements.txt (line 1))
  Downloading torch-2.4.0-cp310-cp310-manylinux1_x86_64.whl (797.2 MB)
     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 797.2/797.2 MB 12.2 MB/s eta 0:00:00
Collecting nvidia-nccl-cu12==2.20.5
  Using cached nvidia_nccl_cu12-2.20.5-py3-none-manylinux2014_x86_64.whl
Requirement already satisfied: filelock in /env/lib/python3.10/site-packages
Building wheels for collected packages: flash-attn
  Building wheel for flash-attn (setup.py): started
  Building wheel for flash-attn (setup.py): still running...
  Building wheel for flash-attn (setup.py): finished with status 'done'
Installing collected packages: mpmath, urllib3, exceptiongroup, retrying, backoff, errorhandler, timeout-decorator
  Attempting uninstall: numpy
    Found existing installation: numpy 2.0.0
WARNING: Running pip as the 'root' user can result in broken permissions and conflicting behaviour with the system package manager.
Successfully installed exceptiongroup-1.2 retrying-1.3 torch-2.4.0
""",
    "pytest": """\
============================= test session starts ==============================
platform linux -- Python 3.11.2, pytest-8.2.0, pluggy-1.5.0
rootdir: /w
collected 214 items
tests/test_errors.py::test_out_of_memory_is_retried PASSED               [  1%]
tests/test_errors.py::test_killed_by_SIGKILL PASSED                      [  2%]
tests/test_net.py::test_connection_refused PASSED                        [  3%]
tests/test_ckpt.py::test_no_space_left_on_device PASSED
tests/test_ckpt.py::test_raises[FileNotFoundError] PASSED
tests/test_oom.py::test_oom_kill SKIPPED (needs root)
======================= 212 passed, 2 skipped in 61.20s ========================
""",
    "make": """\
[ 12%] Building CXX object CMakeFiles/x.dir/src/error.cpp.o
-- Looking for pthread.h
-- Looking for pthread.h - found
-- Performing Test CMAKE_HAVE_LIBC_PTHREAD - Failed
-- Could NOT find MPI (missing: MPI_C_FOUND MPI_CXX_FOUND)
-- CUDA detected: 12.1
-- Found NCCL (include: /usr/include, library: /usr/lib/libnccl.so)
src/a.cpp:12:5: warning: unused variable 'error' [-Wunused-variable]
[100%] Linking CXX shared library libx.so
[100%] Built target x
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
    "deepspeed": """\
[2024-05-01 10:00:00,000] [INFO] [real_accelerator.py:191:get_accelerator] Setting ds_accelerator to cuda (auto detect)
[2024-05-01 10:00:00,000] [WARNING] [runner.py:202:fetch_hostfile] Unable to find hostfile, will proceed with training with local resources only.
 [WARNING]  async_io requires the dev libaio .so object and headers but these were not found.
 [WARNING]  async_io: please install the libaio-dev package with apt
 [WARNING]  If libaio is already installed (perhaps from source), try setting the CFLAGS and LDFLAGS environment variables to where it can be found.
 [WARNING]  Please specify the CUTLASS repo directory as environment variable $CUTLASS_PATH
 [WARNING]  sparse_attn requires a torch version >= 1.5 and < 2.0 but detected 2.3
[2024-05-01 10:00:05,000] [INFO] [comm.py:637:init_distributed] cdb=None
[2024-05-01 10:00:05,000] [INFO] [comm.py:668:init_distributed] Initializing TorchBackend in DeepSpeed with backend nccl
Using /root/.cache/torch_extensions/py310_cu121 as PyTorch extensions root...
No modifications detected for re-loaded extension module fused_adam, skipping build step...
[2024-05-01 10:00:15,000] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempting loss scale: 65536, but hysteresis is 2. Reducing hysteresis to 1
[2024-05-01 10:00:25,000] [WARNING] [stage3.py:2069:step] 2 pytorch allocator cache flushes since last step. this happens when there is high memory pressure and is detrimental to performance.
Invalidate trace cache @ step 0 and module 2: cache has only 2 modules
[2024-05-01 10:09:25,000] [INFO] [launch.py:351:main] Process 4242 exits successfully.
""",
    "slurm": """\
srun: job 4711 queued and waiting for resources
srun: job 4711 has been allocated resources
srun: Job step aborted: no
pyxis: importing docker image: nvcr.io/nvidia/pytorch:24.01-py3
pyxis: imported docker image: nvcr.io/nvidia/pytorch:24.01-py3
Loading cuda/12.1
  Loading requirement: gcc/11.3
The following have been reloaded with a version change:
Submitted batch job 4711
JobID  State  ExitCode
4711   COMPLETED  0:0
4711.0 COMPLETED  0:0
""",
    "ray": """\
2024-05-01 10:00:00,000	INFO worker.py:1636 -- Connecting to existing Ray cluster at address: 10.0.0.1:6379...
2024-05-01 10:00:01,000	WARNING services.py:412 -- Found multiple active Ray instances: {'10.0.5.57:6379', '10.0.5.57:6380'}. Connecting to latest cluster at 10.0.5.57:6379.
(RayTrainWorker pid=954) Setting up process group for: env:// [rank=0, world_size=4]
(autoscaler +5s) Tip: use `ray status` to view detailed cluster status.
(RayTrainWorker pid=954) Moving model to device: cuda:0
(RayTrainWorker pid=954) [state-dump] - num chunks received failed (all): 0
(RayTrainWorker pid=954) Wrapping provided model in DistributedDataParallel.
Trial TorchTrainer_1 completed after 10 iterations at 2024-05-01 10:10:00.
""",
    "vllm": """\
INFO 11-25 08:17:27 config.py:1020] Defaulting to use mp for distributed inference
WARNING 11-25 08:17:28 multiproc_gpu_executor.py:53] Reducing Torch parallelism from 32 threads to 1 to avoid unnecessary CPU contention. Set OMP_NUM_THREADS in the external environment to tune this value as needed.
WARNING 11-25 08:17:28 custom_all_reduce.py:134] Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed. To silence this warning, specify disable_custom_all_reduce=True explicitly.
INFO 11-25 08:17:40 model_runner.py:1077] Loading model weights took 7.1 GB
INFO 11-25 08:17:50 distributed_gpu_executor.py:57] # GPU blocks: 12345, # CPU blocks: 2048
INFO 11-25 08:17:55 model_runner.py:1404] CUDA graphs can take additional 1~3 GiB memory per GPU. If you are running out of memory, consider decreasing `gpu_memory_utilization` or enforcing eager mode.
INFO 11-25 08:17:50 gpu_worker.py] Memory profiling takes 1.2 seconds: the current vLLM instance can use total_gpu_memory (79.11GiB) x gpu_memory_utilization (0.90) = 71.20GiB
INFO 11-25 08:17:50 kv_cache: GPU KV cache size: 418,720 tokens
INFO:     127.0.0.1:4711 - "POST /v1/completions HTTP/1.1" 200 OK
""",
    "words": """\
resuming: no checkpoint found, starting from scratch
retry limit 3, timeout 30 s, backoff 2.0
error_rate=0.02 exception_count=0 failures=0 killed=0
handling of SIGTERM installed, SIGUSR1 saves a checkpoint
data: skipped 3 corrupt images
Num failed requests: 0
loss nan count: 0
0 errors, 2 warnings
memory: 12.1 GB used, out of 80 GB
watchdog enabled, heartbeat every 10 s
connection to tracking server established after 2 retries
waiting for rank 3 ... done in 1.2 s
Preempted: 0 times
exit code: 0
INFO evicted 3 cache entries
""",
    "mpi": """\
--------------------------------------------------------------------------
WARNING: There was an error initializing an OpenFabrics device.
  Local host:   n1
  Local device: mlx5_0
--------------------------------------------------------------------------
[n1:1] 7 more processes have sent help message help-mpi-btl-openib.txt / error in device init
[1,0]<stdout>:step 1 loss 0.2
[1,1]<stderr>:/env/lib/x.py:3: FutureWarning: You are using `torch.load` with `weights_only=False` (the current default value), which uses the default pickle module implicitly.
[1,1]<stdout>:done
""",
    "compile": """\
[rank0]:W1122 10:00:00.1 torch/_dynamo/convert_frame.py:357] torch._dynamo hit config.cache_size_limit (8)
[rank0]:W1122 10:00:00.1 torch/_dynamo/convert_frame.py:357]    function: 'forward' (/w/m.py:10)
[rank0]:W1122 10:00:00.1 torch/_inductor/utils.py:1137] [0/0] Not enough SMs to use max_autotune_gemm mode
AUTOTUNE mm(1024x1024, 1024x1024)
  triton_mm_4 0.0212 ms 100.0%
  mm 0.0230 ms 92.2%
SingleProcess AUTOTUNE benchmarking takes 3.1 seconds and 0.0 seconds precompiling
skipping cudagraphs due to mutated inputs
OutOfResources: skipped config BLOCK_M=256
""",
    "gloo": """\
[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3
[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3
[rank0]:[W1122 10:00:00.9 ProcessGroup.hpp:180] Warning: destroy_process_group() was not called before program exit
""",
    "docker": """\
#5 [2/7] RUN apt-get update && apt-get install -y libibverbs-dev
#5 12.3 debconf: delaying package configuration, since apt-utils is not installed
#5 13.1 Get:1 http://archive.ubuntu.com/ubuntu jammy/main amd64 libgpg-error0 amd64
#5 13.3 update-alternatives: warning: skip creation of /usr/share/man/man1/x.1.gz because associated file doesn't exist
#6 exporting to image
#6 DONE 2.1s
NOTE: The SHMEM allocation limit is set to the default of 64MB.  This may be
   insufficient for PyTorch.  NVIDIA recommends the use of the following flags:
   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 ...
""",
    "handled": """\
2024-05-01 WARNING download attempt 1 failed, retrying in 1 s
2024-05-01 INFO retrying after ConnectionError (attempt 2/5)
2024-05-01 INFO download finished
epoch 1 done
[rank0]: /w/x.py:10: UserWarning: The given NumPy array is not writable
/env/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown
""",
    "notices_of_images_and_hosts": """\
NOTE: The SHMEM allocation limit is set to the default of 64MB.  This may be
   insufficient for PyTorch.  NVIDIA recommends the use of the following flags:
   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 ...
bash: warning: setlocale: LC_ALL: cannot change locale (en_US.UTF-8)
slurmstepd: error: couldn't chdir to `/home/u/x': No such file or directory: going to /tmp instead
OpenBLAS WARNING - could not determine the L2 cache size on this system, assuming 256k
[W NNPACK.cpp:53] Could not initialize NNPACK! Reason: Unsupported hardware.
source: not found in cache, downloading
INFO checkpoint already exists locally, skipping download
INFO: config seed: 31 operand dtype bf16
UserWarning: The given NumPy array is not writable, and PyTorch does not support non-writable tensors. This means writing to this tensor will result in undefined behavior.
UserWarning: FSDP is switching to use `NO_SHARD` instead of ShardingStrategy.FULL_SHARD since the world size is 1.
UserWarning: Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and return a vector.
UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. In PyTorch 1.1.0 and later, you should call them in the opposite order.
RuntimeWarning: os.fork() was called. os.fork() is incompatible with multithreaded code, and JAX is multithreaded, so this will likely lead to a deadlock.
wandb: WARNING Symlinked 0 file into the W&B run directory, call wandb.save again to sync new files.
resumed: IncompatibleKeys(missing_keys=['head.weight'], unexpected_keys=[])
no modifications detected for re-loaded extension module
Time to load fused_adam op: 0.3 seconds
epoch 1 loss 0.3
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
"""Lines that programs print in runs that do not fail, after a heading for each kind."""


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
    assert len(lines) >= 750
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
