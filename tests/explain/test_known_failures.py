"""160 failures of public reports: the right cause comes first, with its rank and advice on retrying.

Each row is the name of a failure, its lines, the code that has to come first with its rank, and
whether the same start can succeed: ``no``, ``maybe`` or ``yes``. Each code was compared by hand with
the cause and the fix in which its report ended.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from typing import Final

import pytest
from explained import built_in_files

from ddpsafe._explain.catalogue import Catalogue, built_in
from ddpsafe._explain.reader import explain_text

FAILURES: Final[tuple[tuple[str, str, str, int | None, str], ...]] = (
    ("eaddrinuse-29500-two-torchrun", "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - A", "PORT-taken", None, "maybe"),
    ("eaddrinuse-port-22", "[W socket.cpp:401] [c10d] The server socket has failed to bind to 0.0.0.0:22 (errno: 98 - Address already in use).\n[E socket.cpp:435] [c10d] The server socket has failed to listen on any local network address.", "PORT-reserved", None, "no"),
    ("eaddrinuse-29400-rdzv", "[W socket.cpp:436] [c10d] The server socket has failed to bind to 0.0.0.0:29400 (errno: 98 - Address already in use).\n[E socket.cpp:472] [c10d] The server socket has failed to listen on any local network address.", "PORT-taken", None, "maybe"),
    ("errno97-ipv6-warning", "[W socket.cpp:401] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not supported by protocol).\n[W socket.cpp:558] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97 - Address family not supported by protocol).", "NOISE-ipv6", None, "no"),
    ("errno97-juwels", "[W socket.cpp:401] [c10d] The server socket cannot be initialized on [::]:7010 (errno: 97 - Address family not supported by protocol).\n[W socket.cpp:558] [c10d] The client socket cannot be initialized to connect to [node1]:7010 (errno: 97 - Address family not supported by protocol).", "NOISE-ipv6", None, "no"),
    ("gai-3-own-hostname", "[W socket.cpp:601] [c10d] The IPv6 network addresses of (user, 53821) cannot be retrieved (gai error: -3 - Temporary failure in name resolution).", "NAME-unresolved", None, "no"),
    ("gai-2-ipv6-brackets", "[W715 20:00:39.842901446 socket.cpp:752] [c10d] The IPv6 network addresses of ([2001:db8::5], 59699) cannot be retrieved (gai error: -2 - Name", "NAME-brackets", None, "no"),
    ("gai-11001-windows", "[W ..\\torch\\csrc\\distributed\\c10d\\socket.cpp:601] [c10d] The IPv6 network addresses of (node1.example, 49779) cannot be retrieved (gai error: 11001", "NAME-unresolved", None, "no"),
    ("gai-loop-then-client-timeout", "The IPv6 network addresses of (host, port) cannot be retrieved (gai error: -2 - Name or service not known).\ntorch.distributed.DistNetworkError: The client socket has timed out after 1800s while trying to connect to (host, port).", "NAME-unresolved", None, "maybe"),
    ("clients-joined-1-of-2", "DistStoreError: Timed out after 300 seconds waiting for clients. 1/2 clients joined.", "RDZV-missing-rank", None, "no"),
    ("workers-joined-pr111805", "torch.distributed.DistStoreError: Timed out after 6 seconds waiting for workers. 1/2 workers joined.", "RDZV-missing-rank", None, "no"),
    ("nccl-id-get-socket-timeout-slow-rank0", "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got", "RDZV-slow-rank-0", 0, "maybe"),
    ("tcpstore-should-dump-broken-pipe", '[rank1]:[W1229 22:06:38.480071392 ProcessGroupNCCL.cpp:1662] [PG ID 0 PG GUID 0 Rank 1] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shu', "PEER-lost", 1, "maybe"),
    ("gloo-ifname-ib0", "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address for: ib0", "GLOO-interface", None, "no"),
    ("gloo-ifname-eth0-absent", "RuntimeError: Unable to find address for: eth0", "GLOO-interface", None, "no"),
    ("gloo-hostname-unresolvable", "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:127] rp != nullptr. Unable to find address for: node1.example", "GLOO-hostname", None, "no"),
    ("gloo-loopback-fallback", "[rank8] Gloo connectFullMesh failed ... timed out connecting: SO_ERROR: Connection refused,\n        remote=[127.0.0.1]:14215", "GLOO-loopback", 8, "no"),
    ("gloo-fullmesh-ec2-sg", "RuntimeError: Gloo connectFullMesh failed with [...] no error", "GLOO-ports-closed", None, "no"),
    ("gloo-connect-refused-old", "RuntimeError: [/opt/conda/conda-bld/pytorch_1682343967769/work/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [172.31.71.170]:13195: Connection refused", "GLOO-refused", None, "maybe"),
    ("nccl-no-socket-iface-eth0", "Last error:\nBootstrap : no socket interface found", "NCCL-interface", None, "no"),
    ("nccl-sw-caused-conn-abort-wrong-subnet", "node1:8969:8969 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.37.12.78<46417> failed : Software caused connection abort\nRuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)", "NCCL-software-abort", None, "no"),
    ("nccl-dup-gpu-default-device", "Last error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000", "NCCL-duplicate-gpu", None, "no"),
    ("nccl-dup-gpu-horovod", "[1,2]<stdout>:node1:29880:30398 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000", "NCCL-duplicate-gpu", 2, "no"),
    ("nccl-shm-posix-fallocate", "include/shm.h:28 NCCL WARN Call to posix_fallocate failed: No space left on device\ninclude/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-250a7cc850ba9298-0-1-3 (size 9637888)", "NCCL-shm", None, "no"),
    ("nccl-shm-emptydir", "[3] NCCL INFO include/shm.h:41 -> 2\n[3] include/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-1462445a6f01cbfc-1-2-3 (size 9637888)", "NCCL-shm", None, "no"),
    ("nccl-shm-segment-short", "Error while creating shared memory segment /dev/shm/nccl-pZafXL (size 7340384)", "NCCL-shm", None, "no"),
    ("nccl-remote-conn-reset-ib", "Last error:\nsocketProgressOpt: Call to recv from 172....<33759> failed : Connection reset by peer", "PEER-lost", None, "maybe"),
    ("nccl-ib-err12-vendor129", "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error: NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0, vendor err 129", "NCCL-ib-timeout", None, "maybe"),
    ("nccl-ib-memlock-iova2", "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "NCCL-ib-memlock", None, "no"),
    ("nccl-ib-modify-qp-unreachable", "node1:225140:225355 [0] misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable\nnode1:225140:225355 [0] proxy.cc:1519 NCCL WARN [Proxy Service 1] Failed to execute operation Connect from rank 1, retcode 2", "NCCL-ib-route", None, "no"),
    ("nccl-insufficient-driver", "node1:2871:2871 [32523] misc/cudawrap.cc:182 NCCL WARN Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'", "NCCL-driver", None, "no"),
    ("cuda-invalid-ordinal-nproc4-of-2", "RuntimeError: cuda runtime error (101) : invalid device ordinal at /pytorch/torch/csrc/cuda/Module.cpp:59", "CUDA-ordinal", None, "no"),
    ("cuda-invalid-ordinal-thc10", "RuntimeError: cuda runtime error (10) : invalid device ordinal at /pytorch/torch/csrc/cuda/Module.cpp:33\nTHCudaCheck FAIL file=/pytorch/torch/csrc/cuda/Module.cpp line=33 error=10 : invalid device ordinal", "CUDA-ordinal", None, "no"),
    ("cuda-fork-reinit", "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method", "CUDA-fork", None, "no"),
    ("cuda-oom-resume-gpu0", "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 11.17 GiB total capacity; 962.69 MiB already allocated; 17.19 MiB f", "CUDA-oom", None, "no"),
    ("cuda-driver-too-old-11040", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and installing a new version from the URL: h", "NCCL-driver", None, "no"),
    ("cuda-driver-too-old-10010", "RuntimeError: The NVIDIA driver on your system is too old (found version 10010). Please update our GPU driver by downloading and installing a new version", "NCCL-driver", None, "no"),
    ("cuda-busy-exclusive-process", "Check failed: error == cudaSuccess (46 vs. 0)  all CUDA-capable devices are busy or unavailable", "CUDA-busy", None, "maybe"),
    ("cuda-busy-thc46", "THCudaCheck FAIL file=/opt/conda/conda-bld/pytorch_1503970438496/work/torch/lib/THC/generic/THCStorage.cu line=66 error=46 : all CUDA-capable devices are busy or unavailable", "CUDA-busy", None, "maybe"),
    ("cuda-xid79", "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus", "HW-gpu-lost", None, "maybe"),
    ("cuda-nvsmi-unknown-error", "Unable to determine the device handle for GPU0000:03:00.0: Unknown Error", "HW-gpu-lost", None, "maybe"),
    ("dl-bus-error-shm", "RuntimeError: DataLoader worker (pid 37) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your share", "MEM-shm", None, "no"),
    ("dl-bus-error-protenix", "RuntimeError: DataLoader worker (pid 572) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shar", "MEM-shm", None, "no"),
    ("dl-killed-oom", "RuntimeError: DataLoader worker (pid 12847) is killed by signal: Killed", "MEM-worker-killed", None, "maybe"),
    ("dl-ancdata", "RuntimeError: received 0 items of ancdata", "MEM-descriptors", None, "no"),
    ("dl-shm-object-emfile", "RuntimeError: unable to open shared memory object </torch_30997_2076642173> in read-write mode\nOSError: [Errno 24] Too many open files", "MEM-descriptors", None, "no"),
    ("dl-shm-object-marker", "RuntimeError: unable to open shared memory object </torch_2197781_1082808688> in read-write mode", "MEM-shm-objects", None, "no"),
    ("dl-conn-reset-del", "Exception ignored in: <bound method _DataLoaderIter.__del__ of <torch.utils.data.dataloader._DataLoaderIter object at 0x7feb4a51aba8>>\nConnectionResetError: [Errno 104] Connection reset by peer", "DATA-noise-del", None, "yes"),
    ("dl-h5-btree", "KeyError: 'Unable to open object (wrong B-tree signature)", "DATA-forked-handle", None, "no"),
    ("dl-h5-symbol-table", "KeyError: 'Unable to open object (bad symbol table node signature)'", "DATA-forked-handle", None, "no"),
    ("mp-bootstrapping", "        An attempt has been made to start a new process before the\n        current process has finished its bootstrapping phase.", "MP-main-guard", None, "no"),
    ("mp-cant-get-attribute-main", "AttributeError: Can't get attribute 'JigsawModel' on <module '__main__' (built-in)>", "MP-notebook", None, "no"),
    ("mp-cant-get-attribute-dataset", "    self = reduction.pickle.load(from_parent)\nAttributeError: Can't get attribute 'HagridDataset' on <module '__main__' (built-in)>", "MP-notebook", None, "no"),
    ("mp-pickle-local-lambda", "    ForkingPickler(file, protocol).dump(obj)\nAttributeError: Can't pickle local object 'get_cifar.<locals>.<lambda>'", "MP-unpicklable-local", None, "no"),
    ("mp-pickle-local-dataloader-init", "AttributeError: Can't pickle local object 'DataLoaderMasking.__init__.<locals>.<lambda>'", "MP-unpicklable-local", None, "no"),
    ("mp-sigkill", "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL\nUserWarning: semaphore_tracker: There appear to be 15 leaked semaphores to clean up at shutdown", "END-sigkill", 0, "maybe"),
    ("mp-sigsegv", "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGSEGV", "END-sigsegv", 0, "no"),
    ("ddp-unused-params", "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not use\nmaking sure all `forward` function outputs participate in calculating loss.", "DDP-unused", None, "no"),
    ("ddp-ready-twice-ckpt", "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter outside the `forward` functi\nParameter at index 387 with name hf_model.roberta.encoder.layer.23.output.LayerNorm.weight has been marked as ready twice. This means that multiple autograd engine  hooks", "DDP-ready-twice", None, "no"),
    ("ddp-ready-twice-index753", "Parameter at index 753 has been marked as ready twice. This means that multiple autograd engine  hooks have fired for this particular parameter during this iteration. You", "DDP-ready-twice", None, "no"),
    ("ddp-collective-mismatch-shape", "[rank1]: RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=3104, OpType=ALLREDUCE, TensorSh", "DDP-mismatch", 1, "no"),
    ("ddp-collective-mismatch-opdde", "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=_ALLGATHER_BASE, TensorShape=[3", "DDP-mismatch", None, "no"),
    ("nccl-mismatched-collective-old", "init.cc:1247 NCCL WARN Mismatched collective detected, please check your collective calls at and around rank 39. You can use NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL to", "NCCL-truncated", None, "no"),
    ("numeric-hostname-as-ipv4", "[W socket.cpp:697] [c10d] The client socket has failed to connect to 0.104.99.143:47389 (errno: 110 - Connection timed out).\n[E socket.cpp:753] [c10d] The client socket has failed to connect to any network address of (6841231, 47389).", "NAME-digits", None, "no"),
    ("client-timeout-c10d-60s", "[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to 192.0.0.1:1234\ntorch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.", "RDZV-unreachable", None, "maybe"),
    ("env-rank-missing", "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set", "ENV-missing", None, "no"),
    ("env-master-addr-missing", 'raise _env_error("MASTER_ADDR")\nValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR expected, but not set', "ENV-missing", None, "no"),
    ("local-rank-dash", "train.py: error: unrecognized arguments: --local-rank=4", "ENV-local-rank", None, "no"),
    ("slurm-oom-kill-1", "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=37205392.0. Some of your processes may have been killed by the cgroup out-of-memory handler.\nsrun: error: node107: task 0: Out Of Memory", "MEM-host-oom", 0, "no"),
    ("slurm-oom-kill-batch", "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                  python3 main.py --prop hform --epochs 400\nslurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes may have been killed by the cgroup out-of-memory handler.", "MEM-host-oom", None, "no"),
    ("ddp-inconsistent-params-0", "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 161 params, while rank 1 has inconsistent 0 params.", "DDP-first-collective", None, "no"),
    ("ddp-param-size-mismatch", "RuntimeError: [2]: params[4] in this process with sizes [243, 256] appears not to match sizes of the same param in process 0.\nnumber of params: 16818120", "DDP-different-model", None, "no"),
    ("ddp-no-grad-params", "AssertionError: DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.", "DDP-no-grad", None, "no"),
    ("ddp-inplace-buffers", "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.cuda.FloatTensor [1, 32]] is at version 3; expected v", "DDP-buffers", None, "no"),
    ("nccl-watchdog-seq-skew", "[E ProcessGroupNCCL.cpp:458] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=96120, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25624887 millise\n[E ProcessGroupNCCL.cpp:458] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=64088, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25625251 millise", "HANG-watchdog", 7, "maybe"),
    ("nccl-watchdog-stuck-heartbeat", "[rank7]:[E626 05:14:36.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 7] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making pr", "HANG-watchdog-stuck", 7, "maybe"),
    ("nccl-barrier-guess-device", "[W ProcessGroupNCCL.cpp:1569] Rank 0 using best-guess GPU 0 to perform barrier as devices used by this process are currently unknown. This can potentially cause a hang if", "NCCL-guess-device", None, "no"),
    ("nccl-no-gpus", "RuntimeError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "NCCL-no-gpu", None, "no"),
    ("nccl-no-gpus-valueerror", "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "NCCL-no-gpu", None, "no"),
    ("nccl-p2p-acs-hang", "                ACSCtl: SrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-", "NCCL-p2p-acs", None, "no"),
    ("nccl-cuda-999", "[rank0]: Last error:\n[rank0]: Cuda failure 999 'unknown error'", "NCCL-cuda-failure", 0, "maybe"),
    ("gloo-conn-closed-isend", "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [18.25.6.30]:30872", "PEER-lost", None, "maybe"),
    ("gloo-read-error-reset", "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [192.168.70.92]:25266: Connection reset by peer", "PEER-lost", None, "maybe"),
    ("elastic-sighup-nohup", "WARNING:torch.distributed.elastic.agent.server.api:Received 1 death signal, shutting down workers\nWARNING:torch.distributed.elastic.multiprocessing.api:Sending process 2704351 closing signal SIGHUP", "END-sighup", None, "yes"),
    ("elastic-signal1-spark", "torch.distributed.elastic.multiprocessing.api.SignalException: Process 8665 got signal: 1", "END-sighup", None, "yes"),
    ("elastic-childfailed-sigkill", "  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 14750", "END-sigkill", None, "maybe"),
    ("elastic-failed-exit-minus9-k8s", "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 178) of binary: /w/python", "END-sigkill", 0, "maybe"),
    ("elastic-failed-exit-minus9-wsl", "> initializing pipeline with size 1\nERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 29066) of binary: /w/python", "END-sigkill", 0, "maybe"),
    ("elastic-rdzv-timeout-bare", '  "message": {\n    "message": "RendezvousTimeoutError: ",', "RDZV-missing-rank", None, "maybe"),
    ("ckpt-zip-central-dir-diskfull", "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory", "CKPT-truncated", None, "no"),
    ("ckpt-writer-unexpected-pos", "RuntimeError: [enforce fail at inline_container.cc:857] . PytorchStreamWriter failed writing file data/37: file write failed\nRuntimeError: [enforce fail at inline_container.cc:659] .unexpected pos 2387758464 vs 2387758376", "CKPT-disk-full", None, "maybe"),
    ("ckpt-writer-593", "RuntimeError: [enforce fail at inline_container.cc:593] . PytorchStreamWriter failed writing file data/1: file write failed", "CKPT-disk-full", None, "maybe"),
    ("ckpt-writer-file-write-failed-glm", "RuntimeError: [enforce fail at inline_container.cc:471] . PytorchStreamWriter failed writing file data/151: file write failed", "CKPT-disk-full", None, "maybe"),
    ("ckpt-weights-only-namespace", "Weights only load failed. This file can still be loaded, to do so you have two options, do those steps only if you trust the source of the checkpoint.\nWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default.", "CKPT-weights-only", None, "no"),
    ("ckpt-module-prefix", '\tMissing key(s) in state_dict: "projection.0.weight", "recur_block.0.0.conv1.weight"\n\tUnexpected key(s) in state_dict: "module.projection.0.weight", "module.recur_block.0.0.conv1.weight"', "CKPT-prefix", None, "no"),
    ("store-barrier-stale-filestore", "Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1 (world_size=2, worker_count=4, timeout=0:02:00)", "RDZV-stale-file", 0, "no"),
    ("store-barrier-one-missing", "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1 (world_size=2, worker_count=1, timeout=0:30:00)", "RDZV-missing-rank", 0, "maybe"),
    ("k8s-host-not-found-race", "    store = TCPStore(master_addr, master_port, start_daemon)\nValueError: host not found: Name or service not known", "NAME-unresolved", None, "yes"),
    ("t213-eaddrinuse-98", "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29611, useIpv6: false, code: -98, name: EADDRINUSE, message", "PORT-taken", None, "maybe"),
    ("t213-gai-blank", "[W1121 01:06:40.250016409 socket.cpp:764] [c10d] The IPv6 network addresses of ( 127.0.0.1, 29621) cannot be retrieved (gai error: -2 - Name or service not known).\n[E1121 01:06:49.899700008 TCPStore.cpp:328] [c10d] TCP client failed to connect/validate to host  127.0.0.1:29621 - timed out (try=1, timeout=4000ms): The client socket h", "NAME-blank", None, "no"),
    ("t213-gai-nosuchhost", "[W1121 01:07:06.137737141 socket.cpp:764] [c10d] The IPv6 network addresses of (nosuchhost, 29624) cannot be retrieved (gai error: -2 - Name or service not known).\n[E1121 01:07:15.924663198 TCPStore.cpp:328] [c10d] TCP client failed to connect/validate to host nosuchhost:29624 - timed out (try=1, timeout=4000ms): The client socket h", "NAME-unresolved", None, "maybe"),
    ("t213-ping-failed-http", "[W1121 01:07:00.571549927 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host 6841231:29623 - retrying (try=0, timeout=4000ms, delay=610ms): Ping failed, invalid value returned from server. Expected: 23726, Got: 1347703880", "RDZV-not-a-store", None, "no"),
    ("t213-clients-joined", "torch.distributed.DistStoreError: Timed out after 5 seconds waiting for clients. 1/2 clients joined.", "RDZV-missing-rank", None, "no"),
    ("t213-wait-timeout", "[W1121 01:07:42.387653656 socket.cpp:494] [c10d] waitForInput: socket SocketImpl(fd=13, addr=[::ffff:127.0.0.1]:43006, remote=[::ffff:127.0.0.1]:29613) timed out after 20\ntorch.distributed.DistStoreError: wait timeout after 2000ms, keys: /missing", "HANG-timeout", None, "maybe"),
    ("t213-not-initialized", "ValueError: Default process group has not been initialized, please make sure to call init_process_group.", "PG-not-initialized", None, "no"),
    ("t213-port-range", "ValueError: port must have value from 0 to 65535 but was 80000.", "ENV-port-range", None, "no"),
    ("t213-no-nccl", "RuntimeError: Distributed package doesn't have NCCL built in", "NCCL-not-built", None, "no"),
    ("t213-gloo-only-master-port-open", "[E1121 01:10:16.392460355 ProcessGroupGloo.cpp:67] Gloo connectFullMesh failed with [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.h:311] Connect timeout", "GLOO-ports-closed", None, "no"),
    ("t213-gloo-loopback-advertised", "RuntimeError: Gloo connectFullMesh failed with [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:15747$1", "GLOO-loopback", None, "no"),
    ("t213-gloo-ifname-missing", "RuntimeError: [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth9", "GLOO-interface", None, "no"),
    ("t213-gloo-peer-killed", "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48258. This is typically caused by a remote wor", "PEER-lost", None, "maybe"),
    ("t213-gloo-recv-timeout", "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete", "HANG-timeout", None, "maybe"),
    ("t213-monitored-barrier", "[rank0]:[E1121 01:09:27.707874761 ProcessGroupGloo.cpp:67] [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms", "HANG-barrier", 0, "maybe"),
    ("gloo-enforce-length", "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 1046204 vs 1040256", "GLOO-sizes", None, "no"),
    ("nccl-connect-no-route", "node1:795:822 [0] include/socket.h:409 NCCL WARN Net : Connect to 192.168.1.9<54263> failed : No route to", "NCCL-unreachable", None, "no"),
    ("nccl-pollconnect-retrying", "node1:1183664:1184669 [0] NCCL INFO socketPollConnect: connect returned No route to host, retrying (26/34) after sleep for 2600 msec", "NCCL-unreachable", None, "no"),
    ("nccl-ipv6-linklocal", "node1:90736:91655 [0] include/socket.h:403 NCCL WARN Connect to fe80::c4eb:49ff:fe04:e32d%6<57335> failed : Network is unreachable", "NCCL-link-local", None, "no"),
    ("nccl-message-truncated", "transport/net_socket.cc:424 NCCL WARN NET/Socket : peer 192.168.161.30<59210> message truncated :\nreceiving 1048576 bytes instead of 65536", "NCCL-truncated", None, "no"),
    ("nccl-undefined-symbol-register", "torch/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister", "NCCL-two-libraries", None, "no"),
    ("nccl-sigbus-shm-backtrace", "[node1:3039 :0:3095] Caught signal 7 (Bus error: nonexistent physical address)\n 4 0x0000000000059e97 ncclGetUniqueId()  ???:0", "NCCL-shm", None, "no"),
    ("pg-not-destroyed-warning", "[rank3]:[W515 07:06:42.915740178 ProcessGroupNCCL.cpp:1117] WARNING: process group has NOT been destroyed before it is being destructed. On normal program exit, the appli", "NOISE-not-destroyed", 3, "no"),
    ("cuda-assert-nll", "../aten/src/ATen/native/cuda/NLLLoss2d.cu:103: nll_loss2d_forward_kernel: block: [5,0,0], thread: [996,0,0] Assertion `t >= 0 && t < n_classes` failed.", "CUDA-label", None, "no"),
    ("cuda-ecc-node", "RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.", "HW-ecc", None, "maybe"),
    ("cuda-802-fabricmanager", "UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized (Triggered internally at  ../c10/cuda/CUDAFunctions.cpp:112.)", "HW-fabric-manager", None, "maybe"),
    ("cuda-802-thc", "RuntimeError: cuda runtime error (802) : system not yet initialized at /opt/conda/conda-bld/pytorch_1579022034529/work/aten/src/THC/THCGeneral.cpp:50", "HW-fabric-manager", None, "maybe"),
    ("cuda-no-kernel-image", "    self.num_batches_tracked.add_(1)  # type: ignore[has-type]\nRuntimeError: CUDA error: no kernel image is available for execution on the device", "CUDA-arch", None, "no"),
    ("cuda-oom-other-process", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB (GPU 0; 31.75 GiB total capacity; 5.22 GiB already allocated; 44.69 MiB free; 5.22 GiB reserv", "CUDA-oom-others", None, "maybe"),
    ("cuda-oom-context", "RuntimeError: CUDA error: out of memory", "CUDA-oom", None, "maybe"),
    ("t213-dl-shm-enospc", "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: unable to allocate shared memory(shm) for file </torch_6947_4020290523_0>: No space left on device (28)", "MEM-shm", None, "no"),
    ("t213-dl-bus", "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\nRuntimeError: DataLoader worker (pid 7792) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your sha", "MEM-shm", None, "maybe"),
    ("t213-dl-killed", "RuntimeError: DataLoader worker (pid 6027) is killed by signal: Killed.\nRuntimeError: DataLoader worker (pid(s) 6027) exited unexpectedly", "MEM-worker-killed", None, "maybe"),
    ("t213-dl-exit3", "RuntimeError: DataLoader worker (pid 6093) exited unexpectedly with exit code 3. Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better err", "DATA-worker-exit", None, "no"),
    ("dl-exited-code1", "RuntimeError: DataLoader worker (pid 39637) exited unexpectedly with exit code 1", "DATA-worker-exit", None, "no"),
    ("t213-dl-filenotfound", "FileNotFoundError: Caught FileNotFoundError in DataLoader worker process 0.\nFileNotFoundError: [Errno 2] No such file or directory: 'data/train/img_10.png'", "DATA-path", None, "no"),
    ("dl-lmdb-pickle", "TypeError: cannot pickle 'Environment' object", "MP-unpicklable-handle", None, "no"),
    ("dl-lmdb-pickle-old", "TypeError: can't pickle Environment objects", "MP-unpicklable-handle", None, "no"),
    ("t213-dl-lock-pickle", "UserWarning: Got pickle error when attempting to start a worker Process. This might be because the worker Process arguments are not picklable.\nTypeError: cannot pickle '_thread.lock' object", "MP-unpicklable-handle", None, "no"),
    ("t213-dl-timeout", "RuntimeError: DataLoader timed out after 3 seconds", "DATA-worker-timeout", None, "maybe"),
    ("t213-dl-emfile", "RuntimeError: unable to open shared memory object </torch_6242_799818006_51> in read-write mode: Too many open files (24)\nOSError: [Errno 24] Too many open files", "MEM-descriptors", None, "no"),
    ("t213-dl-stack", "RuntimeError: stack expects each tensor to be equal size, but got [1] at entry 0 and [2] at entry 1", "DATA-collate", None, "no"),
    ("t213-mp-local-fn", "    ForkingPickler(file, protocol).dump(obj)\nAttributeError: Can't pickle local object 'main.<locals>.w'", "MP-unpicklable-local", None, "no"),
    ("t213-mp-sigbus", "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGBUS", "MEM-shm", 1, "maybe"),
    ("t213-mp-exit5", "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 5", "END-exit-code", 1, "no"),
    ("t213-ddp-unused-indices", "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.\nParameter indices which did not receive grad for rank 0: 2 3", "DDP-unused", None, "no"),
    ("t213-ddp-ready-twice", "Parameter at index 1 with name a.bias has been marked as ready twice. This means that multiple autograd engine  hooks have fired for this particular parameter during this", "DDP-ready-twice", None, "no"),
    ("t213-ddp-shape", "RuntimeError: [1]: params[0] in this process with sizes [5, 4] appears not to match sizes of the same param in process 0.", "DDP-different-model", None, "no"),
    ("t213-ddp-detail-mismatch", "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[4], Ten", "DDP-mismatch", None, "no"),
    ("t213-ddp-detail-segv", 'Fatal Python error: Segmentation fault\n  File "/opt/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", line 1473 in _ddp_init_helper', "DDP-debug-crash", None, "no"),
    ("t213-exit-sigabrt", "terminate called without an active exception\n  traceback : Signal 6 (SIGABRT) received by PID 8033", "END-at-exit", None, "yes"),
    ("t213-elastic-sigkill", "E1121 01:18:43.214000 8085 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 8091) of binary: /opt/venv/bin/python3\n  exitcode  : -9 (pid: 8091)  (SIGKILL)", "END-sigkill", 1, "maybe"),
    ("t213-elastic-sighup", "W1121 01:19:03.951000 8240 torch/distributed/elastic/agent/server/api.py:753] Received 1 death signal, shutting down workers\ntorch.distributed.elastic.multiprocessing.api.SignalException: Process 8240 got signal: 1", "END-sighup", None, "yes"),
    ("t213-elastic-rdzv-timeout", "    raise RendezvousTimeoutError\ntorch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "RDZV-missing-rank", None, "maybe"),
    ("rdzv-closed-etcd-none-id", '  "message": {\n    "message": "RendezvousClosedError: ",', "RDZV-closed", None, "no"),
    ("t213-ckpt-einval-tiny", "OSError: [Errno 22] Invalid argument", "CKPT-tiny", None, "no"),
    ("t213-ckpt-central-dir", "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory. This is an internal miniz error. If you are seeing this error, there is a", "CKPT-truncated", None, "no"),
    ("t213-ckpt-lfs-pointer", "WeightsUnpickler error:\nUnsupported operand 118", "CKPT-lfs", None, "no"),
    ("t213-ckpt-no-parent", "RuntimeError: Parent directory nodir/x does not exist.", "CKPT-directory", None, "no"),
    ("t213-ckpt-size-mismatch", "\tsize mismatch for weight: copying a param with shape torch.Size([64, 64]) from checkpoint, the shape in current model is torch.Size([32, 64]).", "CKPT-shape", None, "no"),
    ("file-exists-race", "FileExistsError: [Errno 17] File exists: '/path/to/run_dir/log/validation'", "DATA-mkdir-race", None, "yes"),
    ("thread-creation-eagain", "libgomp: Thread creation failed: Resource temporarily unavailable", "ENV-threads", None, "maybe"),
)  # fmt: skip
"""Excerpts of a few lines."""

_RETRIES: Final = {
    "no": {"never", "once", "elsewhere"},
    "maybe": {"never", "once", "yes", "elsewhere"},
    "yes": {"once", "yes"},
}
"""The allowed advice. A failure that a restart cannot repair may share its lines with one that passes,
such as a name that is not known yet: those get ``once``."""
_NETWORK: Final = (
    "NCCL-unreachable", "NCCL-refused", "MPI-unreachable", "RDZV-unreachable", "RDZV-refused",
    "RDZV-loopback", "GLOO-refused", "GLOO-ports-closed",
)  # fmt: skip


def test_the_cause_of_a_reported_failure_comes_first() -> None:
    """With the rank whose lines show it, a fix, and advice on retrying."""
    wrong = []
    for name, log, code, rank, again in FAILURES:
        first = next(iter(explain_text(log)), None)
        if first is None or (first.code, first.rank) != (f"DS-{code}", rank):
            wrong.append(f"{name}: DS-{code} of rank {rank} is wanted, found {first}")
        elif first.retry not in _RETRIES[again] or not first.fix:
            wrong.append(f"{name}: to try again is {again!r}, found {first.retry!r}, {first.fix!r}")
    assert not wrong, "\n".join(wrong)


def test_hardly_any_permanent_failure_is_retried() -> None:
    """At most one in ten jobs that fail the same way each time is restarted."""
    cannot = [row for row in FAILURES if row[4] == "no"]
    tried = [row[0] for row in cannot if explain_text(row[1])[0].retry in {"once", "yes"}]
    assert len(tried) <= len(cannot) // 10, tried


def test_the_reported_death_of_a_peer_is_not_a_network_failure() -> None:
    """Neither of the first two causes is about firewalls, interfaces or ports."""
    rows = [row for row in FAILURES if row[2] in {"PEER-lost", "END-sigkill", "HANG-watchdog"}]
    assert len(rows) > 10
    for name, log, *_ in rows:
        codes = {cause.code.removeprefix("DS-") for cause in explain_text(log)[:2]}
        assert codes.isdisjoint(_NETWORK), name


@pytest.mark.parametrize("width", [80, 100, 120])
def test_folded_lines_hide_hardly_any_failure(width: int) -> None:
    """At 80 columns a terminal hid one in seven of the 160 when each line was read by itself."""
    folded = [
        ["\n".join(textwrap.wrap(line, width, break_on_hyphens=False)) for line in log.split("\n")]
        for _, log, _, _, _ in FAILURES
    ]
    found = [next(iter(explain_text("\n".join(lines))), None) for lines in folded]
    codes = [None if first is None else first.code.removeprefix("DS-") for first in found]
    wrong = [row[0] for row, code in zip(FAILURES, codes, strict=True) if code != row[2]]
    assert len(wrong) <= len(FAILURES) // 50, wrong


def _in_docker(line: str) -> str:
    return json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-11-22T10:11:12.3Z"})


PREFIXES: Final[dict[str, Callable[[str], str]]] = {
    "torch of rank 3": "[rank3]: {}".format,
    "torchrun of rank 3": "[default3]:{}".format,
    "srun of rank 3": "3: {}".format,
    "mpirun of rank 3": "[1,3]<stderr>:{}".format,
    "compose": "trainer-1  | {}".format,
    "ray": "(TrainWorker pid=812, ip=10.0.0.3) {}".format,
    "the logger of ray": "2026-11-22 10:11:12,345 ERROR worker.py:12 -- {}".format,
    "its newer logger": "2026-11-22 10:11:12,345\tERROR tune.py:12 -- {}".format,
    "a date": "2026-11-22 10:11:12,345 {}".format,
    "a worker of vllm": "(Worker_TP0 pid=812) ERROR 11-22 10:11:12 [multiproc_executor.py:932] {}".format,
    "vllm": "ERROR 11-22 10:11:12 [worker.py:12] {}".format,
    "kubernetes": "2026-11-22T10:11:12.345678901Z stderr F {}".format,
    "docker": _in_docker,
    "colour": "\x1b[31m{}\x1b[0m".format,
}


@pytest.mark.parametrize("what", PREFIXES)
def test_line_prefixes_hide_no_failure(what: str) -> None:
    """Those of ranks, loggers and containers, also on each line of a longer message; a rank in them is kept."""
    named = 3 if what.endswith("rank 3") else None
    wrong = []
    for name, log, code, rank, _ in FAILURES:
        first = next(iter(explain_text("\n".join(map(PREFIXES[what], log.split("\n"))))), None)
        if first is None or first.code != f"DS-{code}" or (rank is None and first.rank != named):
            wrong.append((name, first))
    assert not wrong, wrong


def test_every_order_made_by_hand_has_an_example_that_breaks_without_it() -> None:
    """Order follows from levels, areas and places; a rule is ``over`` another only where these do not do."""
    packed = built_in().packed
    logs = {
        table.code: list(table.examples)
        for file in built_in_files()
        for table in file.tables.values()
    }
    for _, log, code, _, _ in FAILURES:
        logs[f"DS-{code}"].append(log)
    needless = []
    for number, rule in enumerate(packed["rules"]):
        for general in rule.get("over", ()):
            rules = list(packed["rules"])
            rules[number] = {**rule, "over": [each for each in rule["over"] if each != general]}
            without = Catalogue({**packed, "rules": rules})
            if all(_codes(log) == _codes(log, without) for log in logs[rule["code"]]):
                needless.append(f"{rule['code']} over {general}")
    assert not needless, needless


def _codes(log: str, catalogue: Catalogue | None = None) -> list[str]:
    return [cause.code for cause in explain_text(log, catalogue)]
