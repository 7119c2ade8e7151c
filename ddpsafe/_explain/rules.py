"""The catalogue of failures: how each shows in a log, its cause, its fix, and whether to retry.

A rule describes a mechanism, not one sentence: its patterns hold what every version of a message has
in common. `LEVELS` orders the rules of different strength; within one level the more specific rule
stands first. Sources are the messages of torch, NCCL, gloo, CUDA and Slurm themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe._errors import FailureKind

Level = Literal["cause", "exception", "end", "symptom", "exit", "peer", "noise"]
"""How much a line proves. ``cause``: it names what is wrong. ``exception``: the script's own error.
``end``: how a process was ended, without why. ``symptom``: a wait that timed out. ``exit``: it ended
itself, which is what a rank does whatever has gone wrong. ``peer``: another rank has gone. ``noise``: harmless, and named only where a log holds nothing else."""

LEVELS: Final[dict[Level, int]] = {
    "cause": 0,
    "exception": 1,
    "end": 2,
    "symptom": 3,
    "exit": 4,
    "peer": 5,
    "noise": 6,
}

Retry = Literal["never", "once", "yes", "elsewhere"]
"""Whether trying again can help: ``once`` may, ``yes`` does, ``elsewhere`` only on other hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One failure of the catalogue.

    Attributes:
        code: Stable name, ``DS-<AREA>-<name>``.
        kind: The failure kind that the launcher gives it.
        level: How much its lines prove.
        retry: Whether trying again can help.
        signs: Patterns of one line; any of them is evidence. A named group may be used in `cause`
            and `fix`.
        also: A pattern that another line of the log has to match; ``None`` where there is none.
        check: What has to hold of the match; ``None`` where that is nothing more.
        over: Codes of more general rules that say nothing more where this one holds.
        cause: What happened.
        fix: What to do, to copy where possible.
    """

    code: str
    kind: FailureKind
    level: Level
    retry: Retry
    signs: tuple[re.Pattern[str], ...]
    also: re.Pattern[str] | None
    check: Callable[[re.Match[str]], bool] | None
    over: frozenset[str]
    cause: str
    fix: str

    @property
    def page(self) -> str:
        """Where to read on, from the root of the documentation."""
        return f"docs/reference/failures.md#{self.code.lower()}"


def _rule(  # noqa: PLR0913 - the columns of the table
    code: str,
    kind: FailureKind,
    retry: Retry,
    *signs: str,
    cause: str,
    fix: str,
    level: Level = "cause",
    also: str = "",
    check: Callable[[re.Match[str]], bool] | None = None,
    over: tuple[str, ...] = (),
) -> Rule:
    patterns = tuple(re.compile(sign) for sign in signs)
    return Rule(
        code=f"DS-{code}",
        kind=kind,
        level=level,
        retry=retry,
        signs=patterns,
        also=re.compile(also) if also else None,
        check=check,
        over=frozenset(f"DS-{code}" for code in over),
        cause=cause,
        fix=fix,
    )


def _is_no_info(match: re.Match[str]) -> bool:
    """Tell whether the line is more than one of those that NCCL_DEBUG=INFO prints of a healthy start."""
    return "NCCL INFO" not in match.string


_HARDWARE: Final = (
    _rule(
        "HW-ecc",
        "hardware",
        "elsewhere",
        r"(?i)uncorrectable (?:NVLink|ECC)|double[- ]bit ECC|Xid .*: (?:48|63|64|94|95)\b",
        cause="A GPU reports memory errors (ECC) that it cannot correct; the device is failing.",
        fix="Take the host out of service (Slurm: scontrol update node=HOST state=drain), run "
        "elsewhere, and see `nvidia-smi -q -d ECC` and dmesg on it.",
    ),
    _rule(
        "HW-gpu-lost",
        "hardware",
        "elsewhere",
        r"fallen off the bus|GPU is lost|Xid .*: (?:79|61|62|119|120)\b"
        r"|Unable to determine the device handle for (?:GPU|gpu)",
        cause="A GPU no longer answers: it has fallen off the bus (power, heat, PCIe or driver).",
        fix="Reboot the host or take it out of service; see `dmesg | grep -i xid`. Run elsewhere.",
    ),
    _rule(
        "HW-nvlink",
        "hardware",
        "elsewhere",
        r"Xid .*: (?:74|144|145|149|150)\b|NVLink: fatal error",
        cause="A link between GPUs (NVLink) reports errors.",
        fix="See `nvidia-smi nvlink -e` and dmesg; reset or drain the host, and run elsewhere.",
    ),
    _rule(
        "HW-fabric-manager",
        "hardware",
        "elsewhere",
        r"\b802\b.{0,40}system not yet initialized|system not yet initialized.{0,20}802|fabric ?manager.{0,40}(?:not|version|fail)",
        cause="The machine has NVSwitches and the NVIDIA fabric manager is not running, or its version differs from the driver's.",
        fix="Start it on the host: systemctl start nvidia-fabricmanager (same version as the driver).",
    ),
    _rule(
        "HW-other-xid",
        "hardware",
        "elsewhere",
        r"NVRM: Xid \(\S+\): (?!(?:13|31|43|45)\b)",
        cause="The NVIDIA driver logged an Xid error for a GPU of this host.",
        fix="Look the Xid's number up in NVIDIA's list, check `dmesg` and `nvidia-smi -q`, and run elsewhere meanwhile.",
    ),
    _rule(
        "HW-storage-io",
        "network",
        "once",
        r"\[Errno (?:5|121|70)\] \w+|Remote I/O error|EXT4-fs error|I/O error, dev|Buffer I/O error",
        cause="The storage reported an input/output error.",
        fix="See dmesg on the host and the state of the disk or mount; run elsewhere until it is repaired.",
    ),
)

_MEMORY: Final = (
    _rule(
        "MEM-host-oom",
        "out-of-memory",
        "never",
        r"(?i)oom[-_ ]kill|Out of memory: Killed process|Memory cgroup out of memory|OOMKilled|task \d+: Out Of Memory|oom_score|exceeded (?:step |job )?memory limit|TERM_MEMLIMIT|job killed: v?mem \S+ exceeded|low on (?:resource: )?memory|exceeds the memory usage threshold|memory usage limit",
        cause="The host or the job's cgroup ran out of memory, and the kernel's out-of-memory killer ended a process.",
        fix="Raise the memory limit (Slurm: --mem, Kubernetes: resources.limits.memory), or lower num_workers, prefetch_factor or what each rank loads.",
    ),
    _rule(
        "MEM-worker-killed",
        "out-of-memory",
        "never",
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: Killed",
        cause="A DataLoader worker was killed (SIGKILL), nearly always by the kernel's out-of-memory killer: host memory ran out, num_workers times the ranks.",
        fix="Lower num_workers or prefetch_factor, keep large lists as arrays, or raise the memory limit; dmesg names the process.",
    ),
    _rule(
        "MEM-shm",
        "user-error",
        "never",
        r"(?i)is killed by signal: Bus error|insufficient shared memory|unable to (?:allocate|write|open|mmap|resize).{0,60}shared memory.{0,90}No space left|out of shared memory|DataLoader workers? .*bus error|received signal.*SIGBUS|terminated with signal SIGBUS",
        cause="Shared memory (/dev/shm) is too small: containers get 64 MB by default, and DataLoader workers hand over their batches there.",
        fix="Enlarge it: docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm. Or lower num_workers.",
    ),
    _rule(
        "NCCL-shm",
        "user-error",
        "never",
        r"posix_fallocate failed|Error while creating shared memory segment|failed to extend .*/dev/shm/nccl|(?i:nccl).{0,80}shm.{0,60}No space left",
        r"(?i)Caught signal 7 \(Bus error",
        cause="Shared memory (/dev/shm) is too small for NCCL's shared-memory transport: containers get 64 MB by default.",
        fix="Enlarge it: docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm.",
    ),
    _rule(
        "MEM-descriptors",
        "user-error",
        "never",
        r"(?i)Too many open files|received 0 items of ancdata|EMFILE|ulimit.*open files",
        over=("MEM-shm-objects",),
        cause="The process ran out of file descriptors (RLIMIT_NOFILE): each tensor that a worker hands over costs one.",
        fix="Raise it: ulimit -n 65536; or torch.multiprocessing.set_sharing_strategy('file_system'); close files that are opened for each sample.",
    ),
    _rule(
        "MEM-shm-objects",
        "user-error",
        "never",
        r"unable to (?:open|mmap|create) .{0,20}shared memory object|unable to mmap \d+ bytes from file </torch_|max_map_count",
        over=("MEM-alloc",),
        cause="Shared-memory objects or file descriptors were exhausted by tensors that workers handed over.",
        fix="Raise ulimit -n, enlarge /dev/shm, and copy what you keep from a batch (tensor.clone()) so that segments are freed.",
    ),
    _rule(
        "CUDA-oom-others",
        "out-of-memory",
        "never",
        r"Process \d+ has [\d.]+ [GM]iB memory in use",
        cause="The GPU is out of memory, and another process holds memory on it.",
        fix="See `nvidia-smi`: end left-over processes, and give each rank its own GPU (torch.cuda.set_device(local_rank), map_location in torch.load).",
    ),
    _rule(
        "CUDA-oom",
        "out-of-memory",
        "never",
        r"(?i)Error\b.{0,40}CUDA out of memory|CUDA error: out of memory|CUDA out of memory\. Tried|OutOfMemoryError|Cuda failure (?:2 )?'?out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|HIP out of memory|unable to find a(?:n engine to execute| valid cuDNN algorithm)",
        cause="A GPU is out of memory. Several ranks on GPU 0 (a torch.load without map_location, a missing set_device) or another program fill it as well as a large batch does.",
        fix="Check `nvidia-smi` for other processes; call torch.cuda.set_device(local_rank) first and torch.load(..., map_location='cpu'); then lower the batch size.",
    ),
    _rule(
        "MEM-alloc",
        "out-of-memory",
        "never",
        r"^(?:\w+\.)*MemoryError|DefaultCPUAllocator: (?:can't|not enough)|^(?!.*ibv_).*Cannot allocate memory|std::bad_alloc|ArrayMemoryError",
        cause="The process asked for more host memory than there was.",
        fix="Lower what each rank loads (num_workers, batch size, memory-mapped data), or raise the memory limit.",
    ),
    _rule(
        "ENV-threads",
        "user-error",
        "never",
        r"(?i)pthread_create failed|can't start new thread|Thread creation failed|fork: retry|\[Errno 11\] Resource temporarily unavailable|unable to fork|pids\.max",
        cause="The limit of processes and threads is exhausted (ulimit -u or the cgroup's pids.max): ranks times workers times OpenMP threads.",
        fix="Set OMP_NUM_THREADS to cores / ranks, lower num_workers, or raise the limit (ulimit -u; docker --pids-limit).",
    ),
)

_DISK: Final = (
    _rule(
        "CKPT-disk-full",
        "user-error",
        "never",
        r"PytorchStreamWriter failed|inline_container\.cc.{0,40}unexpected pos|\.unexpected pos|file write failed|basic_ios::clear: iostream error",
        cause="Writing a checkpoint failed part-way: the disk or the quota is full, or the file system dropped away. The file is damaged.",
        fix="Free space or keep fewer checkpoints; write to a temporary name and rename it, so that the last good one survives.",
    ),
    _rule(
        "DISK-full",
        "user-error",
        "never",
        r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]|low on resource: ephemeral-storage|disk is full|File too large|\[Errno 27\] ",
        cause="A disk or a quota is full, or a file would exceed a limit of it.",
        fix="Free space (df -h, df -i, quota -s), or write elsewhere.",
    ),
    _rule(
        "DISK-stale",
        "mount",
        "once",
        r"Stale file handle|\[Errno 116\]|Transport endpoint is not connected|\[Errno 10[78]\] |Cannot send after transport endpoint shutdown",
        cause="A network file system went away under the job (stale handle).",
        fix="Remount it on the host (findmnt -T PATH), then start again.",
    ),
    _rule(
        "DISK-read-only",
        "user-error",
        "never",
        r"Read-only file system|\[Errno 30\]",
        cause="The file system is mounted read-only, or became so after an error.",
        fix="Write elsewhere, or see dmesg for why the kernel remounted it.",
    ),
)

_ENVIRONMENT: Final = (
    _rule(
        "ENV-compiler",
        "config",
        "never",
        r"Failed to find C compiler|Python\.h: No such file|CUDA_HOME environment variable is not set|Error building extension|CUDAMismatchException|detected CUDA version .{0,60}mismatches|Ninja is required|nvcc(?: was)? not found|fatal error: \S+\.h: No such file",
        cause="Code has to be compiled on this host, and the compiler, its headers, or a CUDA toolkit of torch's version is missing.",
        fix="Install gcc, python3-dev and ninja, and the CUDA toolkit of torch.version.cuda (export CUDA_HOME); or install a prebuilt wheel. The error of the compiler stands above.",
    ),
    _rule(
        "ENV-library",
        "config",
        "never",
        r"version `(?:GLIBCXX|GLIBC|CXXABI)\S+ not found|(?:ImportError|OSError|error while loading shared libraries): (?!lib(?:nccl|cud|cublas|cufft|cusparse))\S+\.so\S*: cannot open shared object file",
        cause="A shared library that a Python package needs is missing on this host, or older than the package expects.",
        fix="Install it on every host (the image of the job), or see that the environment's own lib directory comes first in LD_LIBRARY_PATH.",
    ),
    _rule(
        "ENV-extension",
        "config",
        "never",
        r"undefined symbol: (?!nccl)|operator torchvision::|Couldn't load custom C\+\+ ops|compiled using NumPy 1|may indicate binary incompatibility|compiled with different CUDA (?:major )?versions|DLL load failed",
        cause="A compiled package was built for another version of torch, CUDA or numpy than the one that is installed.",
        fix="Install versions that belong together (torch with its torchvision and torchaudio, numpy<2 for old packages), or rebuild the extension: pip install --no-build-isolation --force-reinstall PACKAGE.",
    ),
    _rule(
        "ENV-module",
        "config",
        "never",
        r"No module named '?(?P<name>[\w.]+)|(?i:importerror): cannot import name '?(?P<name2>\w+)",
        cause="A Python module or a name in it cannot be imported: another environment is active here than where it worked, or versions differ.",
        fix="Compare `which python` and `pip list` on every host; activate the environment in the job script, install what is missing, and see that no file of yours has the module's name.",
    ),
    _rule(
        "ENV-program",
        "config",
        "never",
        r"command not found|execve\(\): .{0,200}(?:No such file|Permission denied)|exec format error|executable file not found|python\S*: can't open file",
        cause="The program to start does not exist on this host or in this container, or is built for another processor.",
        fix="Use absolute paths and activate the environment inside the job script; check the image's architecture (uname -m).",
        over=("DATA-path", "DATA-permission"),
    ),
    _rule(
        "ENV-arguments",
        "config",
        "never",
        r": error: (?:unrecognized arguments|the following arguments are required|argument |ambiguous option)|Unsupported nproc_per_node|No such option:|Error: (?:Missing|Invalid value for)",
        check=lambda match: re.search(r"--local[-_]rank", match.string) is None,
        cause="The command line is refused: an option is unknown, misspelt, or stands on the wrong side of the script's name.",
        fix="Options of the launcher stand before the script, those of the script behind it: torchrun --nproc-per-node=4 train.py --lr 0.1.",
    ),
    _rule(
        "ENV-layout",
        "config",
        "never",
        r"number of tasks per node configured in SLURM|train_batch_size is not equal to|is not divisible by .{0,40}(?:parallel|world)|world.?size .{0,40}(?:not divisible|is not a multiple|does not match|must be divisible)|ntasks.{0,40}does not match",
        cause="The numbers of nodes, processes and GPUs (or sizes derived from them) do not fit together.",
        fix="Make nodes x processes per node = world size in the scheduler, the launcher and the script; Slurm with Lightning: --ntasks-per-node = devices, started by srun.",
    ),
    _rule(
        "ENV-forbidden",
        "config",
        "never",
        r"Operation not permitted|\[Errno 1\] |seccomp",
        cause="The system forbids a call: a container without the capability, a seccomp profile, or a user without the right.",
        fix="Give the container what it lacks (docker --cap-add=SYS_PTRACE or SYS_NICE, --security-opt seccomp=unconfined to prove it), or do without that option.",
    ),
    _rule(
        "SLURM-allocation",
        "config",
        "never",
        r"More processors requested than permitted|Requested node configuration is not available|Invalid (?:account|partition|qos|generic resource)|Unable to (?:create step|allocate resources)|not enough slots available|FailedScheduling|Insufficient nvidia\.com/gpu|No available node types can fulfill|Memory required by task is not available|QOSMax\w+Limit|AssocMax\w+Limit",
        cause="The scheduler cannot give what was asked for: more nodes, processors, GPUs or memory than exist or are allowed, or a wrong partition or account.",
        fix="Compare the request with what there is: sinfo -o '%P %G %c %m', squeue -j ID, kubectl describe pod, mpirun --host with slots; ask for less, or elsewhere.",
    ),
    _rule(
        "SSH-failed",
        "startup-network",
        "once",
        r"ssh: connect to host|Host key verification failed|Permission denied \(publickey|ssh exited with exit code|launcher 'pdsh' not installed|unable to reliably start one or more daemons",
        over=("DATA-permission", "GLOO-refused"),
        cause="The launcher starts the other hosts by ssh, and that failed: no key without a passphrase, an unknown host key, or no ssh server there.",
        fix="`ssh HOST true` has to work without a question from the first host to every other one: ssh-copy-id, ssh-keyscan, and a running sshd.",
    ),
    _rule(
        "K8S-image",
        "config",
        "once",
        r"ImagePullBackOff|ErrImagePull|Failed to pull image|manifest unknown|pull access denied",
        cause="The container's image cannot be pulled: its name or tag is wrong, or the registry asks for credentials.",
        fix="Check the name with `docker pull`, and imagePullSecrets of the pod.",
    ),
    _rule(
        "DATA-credentials",
        "config",
        "never",
        r"(?:401|403) Client Error|GatedRepoError|RepositoryNotFoundError|NoCredentialsError|Unable to locate credentials|api_key not configured|ExpiredToken|InvalidAccessKeyId|Invalid user token|DefaultCredentialsError|wandb\.errors\.(?:UsageError|AuthenticationError)",
        cause="A service (model hub, object store, experiment tracker) refuses access: credentials are missing on this host, or may not read it.",
        fix="Pass the token to every host (HF_TOKEN, AWS_*, WANDB_API_KEY), accept the model's licence, or WANDB_MODE=offline.",
    ),
    _rule(
        "DATA-download",
        "network",
        "once",
        r"urlopen error|HTTPSConnectionPool|Max retries exceeded with url|(?:429|50[0234]) (?:Client|Server) Error|LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to 'https|Couldn't reach .{0,80}(?:Hub|http)|CERTIFICATE_VERIFY_FAILED|requests\.exceptions\.(?:Connection|Proxy|Read|Connect|SSL)|huggingface\.co.{0,40}(?:timed out|unreachable)|EndpointConnectionError|Error: SlowDown|CommError",
        over=("NAME-unresolved",),
        cause="A download from the internet failed: compute nodes have no way out, the proxy is not set, or the server refused so many ranks at once.",
        fix="Download before the job and set HF_HUB_OFFLINE=1 (or a local path); or set https_proxy; or let rank 0 download first, the others after a barrier.",
    ),
    _rule(
        "COMPILE-cache",
        "user-error",
        "yes",
        r"(?:\.triton/|torchinductor_\w+/|torch_extensions/|TRITON_CACHE).{0,200}(?:No such file|tmp\.pid|Text file busy|File exists)|No such file or directory: '[^']*(?:\.triton|torchinductor_|torch_extensions)|Text file busy",
        over=("DATA-path", "DATA-mkdir-race"),
        cause="Ranks compile into the same cache directory at once, often on a network file system, and take each other's files away.",
        fix="A local cache for each host: export TRITON_CACHE_DIR=/tmp/triton-$LOCAL_RANK TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TORCH_EXTENSIONS_DIR=/tmp/ext.",
    ),
    _rule(
        "COMPILE-failed",
        "user-error",
        "never",
        r"BackendCompilerFailed|InductorError|CppCompileError|LoweringException|torch\._dynamo\.exc\.\w+|triton\.compiler\.errors|OutOfResources: out of resource",
        cause="torch.compile failed to compile a part of the model.",
        fix="Run without torch.compile (TORCHDYNAMO_DISABLE=1) to see that the rest works; TORCH_LOGS=+dynamo and TORCHDYNAMO_VERBOSE=1 name the code.",
        level="exception",
    ),
    _rule(
        "TRAIN-nan",
        "user-error",
        "never",
        r"(?i)^loss is (?:nan|inf)|returned nan values in its|loss scale already at minimum|Non-finite (?:loss|gradient|norm)",
        cause="The loss or a gradient is not finite (NaN or infinity), and the script stops on it.",
        fix="Lower the learning rate, clip gradients, look at the batch; bf16 in place of fp16; torch.autograd.set_detect_anomaly(True) names the operation.",
    ),
)

_NCCL: Final = (
    _rule(
        "NCCL-interface",
        "startup-network",
        "never",
        r"(?i)Bootstrap ?: no socket interface found|NET/Socket ?: No interface found|no usable interface",
        cause="NCCL_SOCKET_IFNAME names no interface of this host, or excludes all of them.",
        fix="See `ip -br addr`, and set it to one that exists on every host, e.g. export NCCL_SOCKET_IFNAME='=eth0', or unset it.",
    ),
    _rule(
        "NCCL-link-local",
        "startup-network",
        "never",
        r"(?i)Connect to (?:\[)?fe80:.{0,80}(?:failed|unreachable)|fe80::\S+ .*unreachable",
        cause="A rank announced an IPv6 link-local address (fe80::…), which other hosts cannot reach.",
        fix="Choose an interface with a routable address on every host: export NCCL_SOCKET_IFNAME='=eth0' and NCCL_SOCKET_FAMILY=AF_INET.",
    ),
    _rule(
        "NCCL-p2p",
        "config",
        "never",
        r"peer access is not supported|peer mapping resources exhausted|doesn't support faster communication|P2P is disabled between connected|peer access .{0,20}already enabled",
        over=("NCCL-cuda-failure",),
        cause="Direct access from GPU to GPU (P2P) does not work between these GPUs: consumer cards, a virtual machine, or two PCIe roots.",
        fix="export NCCL_P2P_DISABLE=1 (and NCCL_IB_DISABLE=1 without InfiniBand); `nvidia-smi topo -m` shows how they are connected.",
    ),
    _rule(
        "NCCL-ib-device",
        "config",
        "never",
        r"(?i)NET/IB ?: (?:No device found|Unable to open device)|ibv_(?:get_device_list|open_device|query_\w+) failed",
        check=_is_no_info,
        cause="NCCL finds no usable InfiniBand or RoCE adapter: NCCL_IB_HCA names none of this host, or /dev/infiniband is not in the container.",
        fix="See `ibv_devinfo`; correct or unset NCCL_IB_HCA, start the container with --device=/dev/infiniband, or use TCP: export NCCL_IB_DISABLE=1.",
        level="symptom",
    ),
    _rule(
        "NCCL-plugin",
        "config",
        "never",
        r"NET/OFI (?:Unable|Failed|No )|Unable to find a protocol that worked|NET/Plugin.{0,60}(?:fail|incompatible|undefined)|NCCL_NET ?= ?\w+ .{0,40}not found|Failed to initialize any NET plugin|fi_getinfo",
        check=_is_no_info,
        cause="NCCL's network plugin (EFA, OFI, a cloud's own) cannot start: its version does not fit NCCL, or the device is not in the container.",
        fix="Use the plugin version of the cloud's NCCL image, pass the devices (vpc.amazonaws.com/efa), or NCCL_NET=Socket to prove that it is this.",
    ),
    _rule(
        "NCCL-topology",
        "config",
        "never",
        r"Attribute \w+ of node \w+ not found|Could not open XML topology file|Could not find a path for pattern|XML Import .{0,60}not found|Failed to find reverse path",
        over=("DATA-path",),
        check=_is_no_info,
        cause="NCCL cannot make sense of the machine's topology: a wrong NCCL_TOPO_FILE, or a container or virtual machine that hides PCI devices.",
        fix="Unset NCCL_TOPO_FILE (and NCCL_GRAPH_FILE), mount /sys into the container, or use the file that the cloud gives for this machine type.",
    ),
    _rule(
        "ENV-same-rank",
        "config",
        "never",
        r"rank (?P<rank>\d+) of \d+ ranks has already checked in|(?:two|multiple) processes .{0,20}same rank|Duplicate rank",
        cause="Two processes joined as rank {rank}: the ranks are computed wrongly (every node numbers its own from 0), or an older job uses the same endpoint.",
        fix="rank = node_rank x processes per node + local_rank, or let the launcher set RANK; another MASTER_PORT for each job.",
    ),
    _rule(
        "ENV-world-differs",
        "config",
        "never",
        r"mismatch in rank count from procs|world_size .{0,30}(?:differ|mismatch)|different world[ _]size",
        cause="The processes were started with different world sizes.",
        fix="Start all of them with the same --nnodes and --nproc-per-node (WORLD_SIZE), and another MASTER_PORT for each job.",
    ),
    _rule(
        "NCCL-duplicate-gpu",
        "config",
        "never",
        r"(?i)Duplicate GPU detected",
        cause="Two ranks use the same GPU.",
        fix="Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything touches CUDA, hard-code no device, and start no more ranks than GPUs.",
    ),
    _rule(
        "NCCL-ib-memlock",
        "config",
        "never",
        r"(?i)ibv_(?:reg_mr|create_qp|create_cq|alloc_pd)\w* failed.{0,40}(?:Cannot allocate memory|Resource temporarily)|RLIMIT_MEMLOCK",
        cause="The limit on locked memory (ulimit -l) is too low for InfiniBand or RoCE.",
        fix="Raise it to unlimited: docker run --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK; limits.conf.",
    ),
    _rule(
        "NCCL-ib-route",
        "startup-network",
        "never",
        r"(?i)ibv_modify_qp failed|ibv_\w+ failed with error",
        cause="The InfiniBand or RoCE adapters chosen on two hosts cannot reach each other (subnet, GID index, or device choice).",
        fix="Choose the adapters: NCCL_IB_HCA=mlx5_0, and for RoCE the right NCCL_IB_GID_INDEX (show_gids); NCCL_IB_DISABLE=1 proves that it is this.",
    ),
    _rule(
        "NCCL-ib-completion",
        "peer-lost",
        "once",
        r"(?i)NET/IB ?: Got completion|ibv_poll_cq|wc_status|IBV_WC_|NET/OFI Request .{0,40}completed with error|got completion with error",
        cause="An InfiniBand, RoCE or EFA transfer failed: a link, switch or GID problem, or the peer's process had died before.",
        fix="Look first for a rank that died. If none did: check the links (ibstat, ibdiagnet, perfquery) of both hosts, and NCCL_IB_TIMEOUT; exclude the host.",
        level="symptom",
    ),
    _rule(
        "NCCL-software-abort",
        "startup-network",
        "never",
        r"(?i)Software caused connection abort",
        cause="NCCL talks to an address of another network than the other hosts do: it chose another interface on one host.",
        fix="Set the same interface on every host, and see that it reaches all containers: export NCCL_SOCKET_IFNAME='=eth0'.",
    ),
    _rule(
        "NCCL-unreachable",
        "startup-network",
        "never",
        r"(?i)^(?!.*c10d)(?:.*\bNCCL\b|.*misc/socket|.*include/socket|.*Net ?:).{0,60}Connect(?:PollConnect| to)?.{0,80}(?:No route to|Network is unreachable|timed out|Connection refused)|socketPollConnect.{0,80}(?:No route|refused|timed out)|socketStartConnect.{0,80}failed|bootstrap.{0,40}(?:Connection refused|timed out|No route)",
        cause="NCCL cannot open a connection to another host: a firewall closes the ephemeral ports, or the address belongs to another network.",
        fix="Open all TCP ports between the hosts of the job, and set the interface that they share: export NCCL_SOCKET_IFNAME='=eth0'.",
    ),
    _rule(
        "NCCL-truncated",
        "user-error",
        "never",
        r"(?i)message truncated|Mismatched collective detected",
        cause="The ranks called NCCL differently: other sizes, another order of collectives, or other NCCL settings or versions.",
        fix="Let every rank call the same collectives with the same shapes, in the same order; compare the NCCL_* variables and versions of the hosts. TORCH_DISTRIBUTED_DEBUG=DETAIL names the call.",
    ),
    _rule(
        "NCCL-two-libraries",
        "config",
        "never",
        r"undefined symbol: nccl|(?i:nccl version mismatch)|NCCL.{0,40}(?:incompatible|mismatch).{0,40}version|libnccl(?!-net)\S*: (?:cannot open|version)",
        cause="Another libnccl than the one torch was built with is loaded first (LD_LIBRARY_PATH, a system package, a second wheel).",
        fix="Take the other one out of LD_LIBRARY_PATH or uninstall it, then reinstall torch; `ddpsafe doctor` lists what is found.",
    ),
    _rule(
        "NCCL-nvls",
        "config",
        "never",
        r"(?i)NVLS|NVLink SHARP.{0,80}|multicast memory",
        check=_is_no_info,
        cause="NCCL could not set up NVLink SHARP (multicast memory): the fabric manager, the driver or the container lacks it.",
        fix="Restart nvidia-fabricmanager with the driver's version; export NCCL_NVLS_ENABLE=0 avoids it.",
        level="symptom",
    ),
    _rule(
        "NCCL-p2p-acs",
        "config",
        "never",
        r"ACSCtl: SrcValid\+",
        cause="PCIe access control (ACS) or the IOMMU redirects GPU peer-to-peer traffic, so NCCL's first collective hangs or is corrupted.",
        fix="Turn ACS off in the BIOS or with setpci on bare metal; export NCCL_P2P_DISABLE=1 proves that it is this.",
    ),
    _rule(
        "NCCL-driver",
        "config",
        "never",
        r"(?i)driver version is insufficient|NVIDIA driver on your system is too old|forward compatibility was attempted|unsupported (?:toolchain|PTX)|CUDA driver.{0,30}(?:older|too old)|NVML: Driver/library version mismatch|couldn't communicate with the NVIDIA driver",
        over=("NCCL-no-gpu",),
        cause="The NVIDIA driver does not fit the CUDA that torch was built for, or the libraries of another driver are loaded.",
        fix="Update the driver (reboot after an update), or install a torch built for an older CUDA; `nvidia-smi` shows what the driver supports.",
    ),
    _rule(
        "NCCL-no-gpu",
        "config",
        "never",
        r"ProcessGroupNCCL is only supported with GPUs|No CUDA GPUs are available|Found no NVIDIA driver|Torch not compiled with CUDA enabled|no CUDA-capable device is detected|nvidia-container-cli: (?:initialization|mount) error|could not select device driver|CUDA unknown error - this may be due|No supported gpu backend found|libcuda\.so\S* ?: cannot open|Failed to open libcuda|torch\.cuda\.is_available\(\) should be True|requires a (?:GPU|CUDA)|torch\.cuda\.is_available\(\) is False",
        cause="torch sees no GPU in this process: a CPU build, a container without --gpus, an empty CUDA_VISIBLE_DEVICES, or no driver.",
        fix="Check torch.version.cuda, `nvidia-smi` inside the container (docker run --gpus all) and CUDA_VISIBLE_DEVICES; use backend gloo on CPUs.",
    ),
    _rule(
        "NCCL-not-built",
        "config",
        "never",
        r"doesn't have (?:the )?NCCL built in|NCCL backend .{0,20}not (?:built|available)|Distributed package doesn't have",
        cause="This torch is built without NCCL (a CPU, macOS or Windows build).",
        fix="Use backend gloo, or install a CUDA build of torch.",
    ),
    _rule(
        "NCCL-cuda-failure",
        "hardware",
        "once",
        r"(?i)Cuda failure (?:999|46|719|700|101|3\b|1\b)?.{0,4}'(?!out of memory|peer access)|ncclUnhandledCudaError|CUDA error: unknown error",
        cause="A CUDA call failed inside NCCL or torch; the driver, the container or an earlier kernel error is behind it, not the network.",
        fix="Look above for the first CUDA error; run once with CUDA_LAUNCH_BLOCKING=1 and NCCL_DEBUG=WARN; check dmesg for Xid.",
        level="symptom",
    ),
    _rule(
        "NCCL-invalid-usage",
        "config",
        "never",
        r"ncclInvalidUsage|ncclInvalidArgument",
        cause="NCCL was called in a way it does not allow: two ranks on one GPU, other world sizes, or tensors on another device.",
        fix="Run with NCCL_DEBUG=WARN for the line before; check that each rank has its own GPU and that all ranks agree on world_size.",
        level="symptom",
    ),
    _rule(
        "NCCL-tensor-on-cpu",
        "user-error",
        "never",
        r"Tensors must be CUDA and dense|No backend type associated with device type",
        cause="A CPU tensor was given to a collective of NCCL (or a GPU tensor to a backend that has none).",
        fix="Move the tensor to the rank's GPU before the collective, or init_process_group('cpu:gloo,cuda:nccl').",
    ),
)

_GLOO: Final = (
    _rule(
        "GLOO-interface",
        "startup-network",
        "never",
        r"ifa != nullptr\. Unable to find address for: (?P<name>\S+)",
        r"Unable to find address for: (?P<name>[^.\s]+)$",
        cause="GLOO_SOCKET_IFNAME names '{name}', an interface that does not exist here or has no address.",
        fix="See `ip -br addr`; set GLOO_SOCKET_IFNAME to the interface that all hosts share, or unset it.",
    ),
    _rule(
        "GLOO-hostname",
        "startup-network",
        "never",
        r"rp != nullptr\. Unable to find address for|Unable to find address for: \S*\.\S+|Unable to resolve hostname to a \(local\) address",
        over=("GLOO-ports-closed",),
        cause="The host's own name does not resolve to one of its addresses, so gloo finds none, or takes loopback, to listen on.",
        fix="Put the name and the routable address into /etc/hosts, or export GLOO_SOCKET_IFNAME=eth0 (an interface of this host).",
    ),
    _rule(
        "GLOO-loopback",
        "startup-network",
        "never",
        r"(?i)(?:Gloo|connectFullMesh|pair\.cc).{0,200}(?:refused|timeout|timed out).{0,60}remote=\[(?:127\.\d+\.\d+\.\d+|::1|::ffff:127)",
        r"remote=\[127\.\d+\.\d+\.\d+\]",
        over=("GLOO-hostname", "GLOO-ports-closed"),
        cause="A rank of another host announced a loopback address (127.…): its name leads to loopback, or GLOO_SOCKET_IFNAME is lo.",
        fix="export GLOO_SOCKET_IFNAME=eth0 (the interface that all hosts share) on every host, or correct /etc/hosts.",
    ),
    _rule(
        "GLOO-ports-closed",
        "startup-network",
        "never",
        r"(?i)connectFullMesh failed",
        cause="gloo could not connect every pair of ranks. Each pair uses ports of its own, so a firewall that opens only MASTER_PORT blocks them.",
        fix="Open all TCP ports between the hosts of the job (security group: allow from itself). `ddpsafe doctor --nnodes N --rdzv-endpoint HOST:PORT` names the blocked pair.",
    ),
    _rule(
        "GLOO-refused",
        "startup-network",
        "once",
        r"pair\.cc:\d+\] connect \[.*(?:Connection refused|No route to host|timed out|unreachable)",
        cause="A peer's gloo port does not answer: the peer has ended or does not listen yet, or a firewall rejects the connection.",
        fix="Look at the peer's log first; then open all TCP ports between the hosts and check the interface.",
    ),
    _rule(
        "GLOO-sizes",
        "user-error",
        "never",
        r"op\.preamble\.length <= op\.nbytes|gloo::EnforceNotMet|invalid tensor (?:size|type|layout) at index|ProcessGroup\w+::\w+: invalid|[Tt]ensor list must have the same size",
        cause="The ranks entered one collective with tensors of different sizes, or different collectives; gloo ends the process.",
        fix="Pass the same shapes on every rank, in the same order of collectives; TORCH_DISTRIBUTED_DEBUG=DETAIL names the call.",
    ),
)

_RENDEZVOUS: Final = (
    _rule(
        "PORT-privileged",
        "port",
        "never",
        r"(?:bind|listen).{0,120}(?:errno: 13\b|[Pp]ermission denied|code: -13\b|EACCES)",
        cause="The port of the rendezvous is below 1024 and needs root, or a policy forbids it.",
        fix="Use a port from 1024 to 65535: --master-port 29501.",
    ),
    _rule(
        "PORT-taken",
        "port",
        "once",
        r"EADDRINUSE|(?i:address already in use)|errno: (?:98|48|10048)\b",
        cause="Another process holds the port of the rendezvous: a second job on the default 29500 or 29400, or what is left of an earlier one.",
        fix="Let a free port be chosen (torchrun --standalone, --rdzv-endpoint=localhost:0), or give each job its own --master-port; find the holder: ss -ltnp 'sport = :29500'.",
    ),
    _rule(
        "GLOO-interface-address",
        "startup-network",
        "never",
        r"gloo.{0,120}(?:bind|listen): Cannot assign requested address|makeDeviceFor\w+\(\): ",
        over=("RDZV-not-own-address",),
        cause="gloo cannot listen on the address that it took for this host: the host's name resolves to an address that the host does not have.",
        fix="export GLOO_SOCKET_IFNAME to an interface of this host (`ip -br addr`), or correct /etc/hosts.",
    ),
    _rule(
        "RDZV-libuv",
        "config",
        "never",
        r"built without libuv support",
        cause="This torch (on Windows, mostly) has no libuv, which the store uses by default.",
        fix="set USE_LIBUV=0 before the start (init_method='env://?use_libuv=False'), or use another build of torch.",
    ),
    _rule(
        "PG-backend",
        "config",
        "never",
        r"Invalid backend: |No rendezvous handler for|Unknown c10d backend|backend .{0,30}is not (?:supported|registered|available)",
        cause="The backend or the init_method is misspelt, or not part of this build of torch.",
        fix="Use 'nccl' or 'gloo' ('cpu:gloo,cuda:nccl' for both), and env://, tcp:// or file://.",
    ),
    _rule(
        "PG-group",
        "user-error",
        "never",
        r"is not registered, please create group|is not part of (?:the )?group|Invalid process group specified|(?:source|dst|src) .{0,20}is not in the group|new group's (?:rank|world size)|group rank .{0,20}not (?:in|part)",
        cause="A collective is called with a group that this rank is not in or that was destroyed, or with a rank that is not in the group.",
        fix="Call dist.new_group() with the same arguments on every rank, call the collective only on members, and pass global ranks as src and dst.",
    ),
    _rule(
        "RDZV-not-own-address",
        "config",
        "never",
        r"errno: 99\b|Cannot assign requested address|EADDRNOTAVAIL|code: -99\b",
        cause="MASTER_ADDR is not an address of the host that rank 0 runs on.",
        fix="Set MASTER_ADDR to the host of rank 0, or start rank 0 there; compare with `ip -br addr`.",
    ),
    _rule(
        "ENV-port-range",
        "config",
        "never",
        r"port must have value from 0 to 65535|Port could not be cast|port must be 0-65535",
        cause="MASTER_PORT is not a port number (computed from a job id, perhaps).",
        fix="Use 1024 to 65535, e.g. $((20000 + SLURM_JOB_ID % 20000)).",
    ),
    _rule(
        "NAME-brackets",
        "config",
        "never",
        r"addresses of \(\[[0-9a-fA-F:]+\]",
        cause="MASTER_ADDR or the endpoint has an IPv6 address in brackets, which the resolver does not take.",
        fix="Write the address without brackets, or use a name.",
    ),
    _rule(
        "NAME-blank",
        "config",
        "never",
        r"addresses of \( +\S|addresses of \(\S+ +,",
        cause="MASTER_ADDR has a blank at its beginning or end, so it is a name that does not exist.",
        fix="export MASTER_ADDR without blanks or quotes around it.",
    ),
    _rule(
        "NAME-digits",
        "config",
        "never",
        r"connect to 0\.\d+\.\d+\.\d+|address(?:es)? of \(\d+, ?\d+\)",
        cause="The host's name is all digits, and the resolver reads it as an IPv4 number.",
        fix="Pass an address: --master-addr / --rdzv-endpoint=127.0.0.1:PORT for one host; give the host another name.",
    ),
    _rule(
        "NAME-unresolved",
        "startup-network",
        "once",
        r"(?i)gai error|Name or service not known|Temporary failure in name resolution|nodename nor servname|getaddrinfo failed|host not found|No address associated with hostname",
        cause="A host name (MASTER_ADDR, or the host's own) cannot be resolved here; that the text speaks of IPv6 does not matter.",
        fix="Check `getent hosts NAME` on every host; use an address or /etc/hosts. On Kubernetes wait for the Service: the record may come later than the pod.",
    ),
    _rule(
        "RDZV-listen",
        "port",
        "once",
        r"server socket has failed to listen on any",
        cause="Rank 0's store, or the launcher's, cannot listen on its port.",
        fix="The lines before say why: the port is taken (ss -ltnp), is below 1024, or MASTER_ADDR is not an address of this host.",
        level="exit",
    ),
    _rule(
        "RDZV-not-a-store",
        "config",
        "never",
        r"Ping failed, invalid value returned|invalid (?:magic|query type)|Expected: \d+, Got: \d+",
        cause="Something that is not torch's store answers at that address: a proxy, a web server, or another program.",
        fix="Check MASTER_ADDR and MASTER_PORT, take the host out of a proxy's way (no_proxy), and use another port.",
    ),
    _rule(
        "RDZV-stale-file",
        "config",
        "never",
        r"store.based barrier.*world_size=(?P<world>\d+), worker_count=(?P<count>\d+)",
        check=lambda match: int(match["count"]) > int(match["world"]),
        cause="More workers registered ({count}) than the world has ({world}): the file:// store is left over from an earlier run.",
        fix="Delete the file before each run, or use tcp:// or env://.",
    ),
    _rule(
        "RDZV-missing-rank",
        "startup-network",
        "once",
        r"(?i)(?P<came>\d+)/(?P<all>\d+) (?:clients|workers) joined",
        r"(?i)store.based barrier",
        r"RendezvousTimeoutError",
        r"Timed out (?:initializing process group|after \d+ seconds waiting for)",
        check=lambda match: match.groupdict().get("came") is None or match["came"] != match["all"],
        cause="Not all ranks or nodes came to the rendezvous in time: one was not started, has failed before, or uses another endpoint, id or world size.",
        fix="Start all of them with the same --nnodes, --rdzv-id and endpoint; look at the log of the one that is missing.",
        level="symptom",
    ),
    _rule(
        "RDZV-closed",
        "config",
        "once",
        r"RendezvousClosedError|rendezvous .{0,30}(?:is|was|already) closed",
        cause="The rendezvous had been closed by an earlier run or by nodes that finished: its id is used again.",
        fix="Use a new --rdzv-id for each job and each restart.",
    ),
    _rule(
        "RDZV-unreachable",
        "startup-network",
        "once",
        r"client socket has (?:timed out|failed to connect)|RendezvousConnectionError|connection to the C10d store has failed|TCP client failed to connect|connect\(\) timed out|EtcdConnectionFailed|EtcdException|failed to send a keep-alive heartbeat to the rendezvous",
        cause="The rendezvous address does not answer: rank 0 (or the endpoint's host) is not up, listens elsewhere, or a firewall drops the packets.",
        fix="Check that rank 0's process runs and listens (ss -ltn), that MASTER_ADDR is its host on every node, and that the port is open: nc -vz HOST PORT.",
        level="symptom",
    ),
    _rule(
        "RDZV-slow-rank-0",
        "startup-network",
        "once",
        r"retrieving ncclUniqueId from \[(?P<rank>\d+)\](?!.*(?:reset by peer|closed|Broken pipe|recv))",
        cause="Rank {rank} had not reached its first collective when the others had waited their whole timeout: it was slower (loading data), or had failed.",
        fix="Look at rank {rank}'s log first; move long work before init_process_group, or raise the timeout.",
        level="symptom",
    ),
    _rule(
        "ENV-missing",
        "config",
        "never",
        r"environment variable (?P<name>\w+) expected, but not set",
        r"rendezvous: (?P<name>rank|world_size|size) parameter missing",
        r"KeyError: '(?P<name>(?:LOCAL_|WORLD_|NODE_)?RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_(?:ADDR|PORT)|SLURM_\w+)'",
        cause="{name} is not set: the script was started with plain python, or by another launcher than it expects.",
        fix="Start it with torchrun (or `ddpsafe run train.py`), or export what the launcher would set.",
    ),
    _rule(
        "ENV-rank-range",
        "config",
        "never",
        r"(?i)invalid rank \d+|rank \d+ .{0,30}(?:out of range|not in|should be in|must be less)|Invalid rank",
        cause="A rank is not below the world size: ranks and world size come from different settings.",
        fix="Let the launcher set both; check nodes x processes per node against WORLD_SIZE.",
    ),
    _rule(
        "ENV-local-rank",
        "config",
        "never",
        r"unrecognized arguments:.*--local[-_]rank",
        cause="torch.distributed.launch passes --local-rank, which the script's argument parser does not know.",
        fix="Start it with torchrun and read os.environ['LOCAL_RANK'], or add '--local-rank' to the parser.",
    ),
    _rule(
        "PG-not-initialized",
        "user-error",
        "never",
        r"Default process group has not been initialized",
        cause="A function of torch.distributed was called before init_process_group(), or after the group was destroyed.",
        fix="Call init_process_group() first on every rank, or guard the call with dist.is_initialized().",
    ),
    _rule(
        "PG-twice",
        "user-error",
        "never",
        r"trying to initialize the default process group twice",
        cause="init_process_group() was called twice in one process.",
        fix="Call it once; guard it with dist.is_initialized(), or destroy the group before.",
    ),
)

_CUDA: Final = (
    _rule(
        "CUDA-ordinal",
        "config",
        "never",
        r"(?i)invalid device ordinal|CUDA error: invalid device|device >= 0 && device < num_gpus|Invalid device id|But your machine only has|specified GPUs? .{0,40}not available",
        cause="A rank asked for a GPU that it does not see: more ranks than visible GPUs, or a global rank used as the device.",
        fix="Start as many ranks as GPUs are visible (CUDA_VISIBLE_DEVICES), and use LOCAL_RANK, not RANK, for set_device.",
    ),
    _rule(
        "CUDA-kernel-timeout",
        "user-error",
        "never",
        r"the launch timed out and was terminated|cudaErrorLaunchTimeout",
        cause="A kernel ran longer than the display driver allows on a GPU that also drives a screen.",
        fix="Use a GPU without a display, turn off the driver's timeout, or make the kernel's work smaller.",
    ),
    _rule(
        "CUDA-fork",
        "user-error",
        "never",
        r"Cannot re-initialize CUDA in forked subprocess|CUDA error: initialization error|if CUDA is already initialized|should only be initialized inside your training function|CUDA has been initialized before",
        cause="CUDA was used before processes were forked: in the parent of a DataLoader worker, or in a notebook before its launcher starts the ranks.",
        fix="Touch CUDA only inside the training function; keep datasets and collate functions on the CPU; or multiprocessing_context='spawn'. In a notebook: restart the kernel first.",
    ),
    _rule(
        "CUDA-busy",
        "hardware",
        "once",
        r"(?i)devices? (?:is|are|is/are) busy or unavailable|cudaErrorDevicesUnavailable",
        cause="The GPU is in exclusive-process mode and another process holds it, or it is in an error state.",
        fix="`nvidia-smi` shows who holds it; end left-overs, or nvidia-smi -c DEFAULT; give each rank its own GPU.",
    ),
    _rule(
        "CUDA-label",
        "user-error",
        "never",
        r"Assertion `?t >= 0 && t < n_classes|nll_loss.{0,60}Assertion|Assertion .{0,60}(?:index|srcIndex|ind) ?(?:<|>=)|index out of bounds.{0,40}failed",
        cause="An index is out of range on the GPU: a label outside [0, n_classes), or an embedding index beyond its table.",
        fix="Check the range of labels and indices (ignore_index, n_classes, vocabulary); on the CPU, or with CUDA_LAUNCH_BLOCKING=1, the line is named.",
    ),
    _rule(
        "CUDA-assert",
        "user-error",
        "never",
        r"device-side assert",
        cause="An assertion failed in a kernel: an index or a label is out of range.",
        fix="Run with CUDA_LAUNCH_BLOCKING=1 (or on the CPU) to see the line, and check labels and indices.",
    ),
    _rule(
        "CUDA-illegal-access",
        "user-error",
        "never",
        r"(?i)illegal memory access|misaligned address|illegal instruction was encountered|unspecified launch failure|cudaErrorIllegalAddress|Xid .*: (?:13|31|43|45)\b",
        cause="A kernel accessed memory that is not its own: a bug in a custom kernel or an index, seldom the hardware.",
        fix="Run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel; check dmesg for Xid 13, 31 or hardware ones.",
    ),
    _rule(
        "CUDA-arch",
        "config",
        "never",
        r"(?i)no kernel image is available|is not compatible with the current PyTorch installation|device kernel image is invalid|named symbol not found",
        cause="This torch (or an extension) has no kernels for this GPU's compute capability.",
        fix="Install a build for it (torch.cuda.get_arch_list() against nvidia-smi --query-gpu=compute_cap); rebuild extensions with TORCH_CUDA_ARCH_LIST.",
    ),
    _rule(
        "CUDA-library",
        "config",
        "never",
        r"CUDNN_STATUS_\w+|CUBLAS_STATUS_(?!ALLOC)\w+|lib(?:cudnn|cublas|cudart|cufft|cusparse)\S* ?: cannot open shared object",
        cause="A CUDA library failed or does not fit torch: out of memory, an index error in an earlier kernel, or two versions of it.",
        fix="Look for an earlier error; check the GPU's free memory; keep one cuDNN/cuBLAS (LD_LIBRARY_PATH).",
        level="symptom",
    ),
    _rule(
        "CUDA-container-nvml",
        "config",
        "once",
        r"Failed to initialize NVML",
        cause="The container has lost its access to the driver (a systemd reload with cgroups), or the driver was updated without a reboot.",
        fix="Restart the container (or use --device=/dev/nvidia*), reboot after a driver update.",
    ),
)

_DDP: Final = (
    _rule(
        "DDP-unused",
        "user-error",
        "never",
        r"Expected to have finished reduction in the prior iteration|did not receive grad|parameters that were not used in producing (?:the )?loss",
        cause="Parameters of the model got no gradient in an iteration, and DDP's reducer waits for them.",
        fix="Remove or freeze the unused layers, or DistributedDataParallel(..., find_unused_parameters=True); TORCH_DISTRIBUTED_DEBUG=DETAIL names them.",
    ),
    _rule(
        "DDP-ready-twice",
        "user-error",
        "never",
        r"mark a variable ready only once|marked as ready twice",
        cause="A parameter's gradient hook fired twice in one iteration: reentrant activation checkpointing, shared parameters, or two forwards.",
        fix="checkpoint(..., use_reentrant=False), or static_graph=True; avoid find_unused_parameters=True with checkpointing.",
    ),
    _rule(
        "DDP-mismatch",
        "user-error",
        "never",
        r"Detected mismatch between collectives on ranks|CollectiveFingerPrint|ranks? (?:are|is) running collective|Forward order differs across ranks|due to shape mismatches\. All shapes across devices",
        cause="The ranks called different collectives, or one with different shapes: their control flow depends on the rank or on the data.",
        fix="Call the same collectives with the same shapes on every rank, also for empty or special batches.",
    ),
    _rule(
        "DDP-different-model",
        "user-error",
        "never",
        r"expects same model across all ranks|appears not to match (?:sizes|strides)|inconsistent \d+ params",
        cause="The ranks have built different models: sizes or the number of parameters depend on the rank, or one rank runs another program.",
        fix="Build the model from the same configuration and seed on every rank.",
    ),
    _rule(
        "DDP-attribute",
        "user-error",
        "never",
        r"'(?:DistributedDataParallel|DataParallel|FullyShardedDataParallel|OptimizedModule|DeepSpeedEngine)' object has no attribute",
        cause="An attribute or method of the model is used on its wrapper (DistributedDataParallel), which does not have it.",
        fix="Use model.module.NAME (ctx.unwrap(model)); but call forward through the wrapper, or gradients are not synchronised.",
    ),
    _rule(
        "DDP-sync-batchnorm",
        "user-error",
        "never",
        r"SyncBatchNorm (?:expected input tensor to be on GPU|layers only work)",
        cause="SyncBatchNorm works with tensors on the GPU only.",
        fix="Move model and batch to the rank's GPU before the forward; on CPUs leave BatchNorm as it is.",
    ),
    _rule(
        "DDP-uninitialized",
        "user-error",
        "never",
        r"Modules with uninitialized parameters can't be used",
        cause="The model has lazy modules whose parameters have no shape yet when it is wrapped.",
        fix="Run one dummy batch through the model before wrapping it.",
    ),
    _rule(
        "FSDP-uniform",
        "user-error",
        "never",
        r"Must flatten tensors with uniform|got mixed torch\.Tensor and DTensor|uniform `requires_grad`|Inconsistent compute device and `?device_id",
        cause="FSDP got parameters of one unit that differ in dtype, requires_grad or device, or plain tensors beside sharded ones.",
        fix="Cast the model to one dtype, wrap frozen parts by themselves (use_orig_params=True), and shard or replicate every tensor of the operation.",
    ),
    _rule(
        "DDP-no-grad",
        "user-error",
        "never",
        r"not needed when a module doesn't have any parameter that requires a gradient",
        cause="A module without trainable parameters was wrapped in DistributedDataParallel.",
        fix="Use the frozen module unwrapped; wrap only what is trained.",
    ),
    _rule(
        "DDP-buffers",
        "user-error",
        "never",
        r"modified by an inplace operation",
        cause="A tensor needed for backward was changed in place; under DDP often a buffer that a second forward has broadcast (BatchNorm in a GAN).",
        fix="DistributedDataParallel(..., broadcast_buffers=False), or one forward for each backward, or SyncBatchNorm.",
    ),
    _rule(
        "DDP-device-ids",
        "user-error",
        "never",
        r"device_ids and output_device arguments only work|device_ids .{0,40}(?:single-device|can only be None)|module parameters on device",
        cause="device_ids does not fit the module: it is on the CPU, or spread over several devices.",
        fix="Move the model to the rank's GPU before wrapping it, and pass device_ids=[local_rank]; none for CPU or model-parallel modules.",
    ),
    _rule(
        "DDP-debug-crash",
        "user-error",
        "never",
        r"in _ddp_init_helper",
        also=r"Segmentation fault",
        cause="Building DDP with TORCH_DISTRIBUTED_DEBUG=DETAIL crashes in this build of torch with gloo.",
        fix="Use TORCH_DISTRIBUTED_DEBUG=INFO or OFF.",
    ),
    _rule(
        "DATA-devices",
        "user-error",
        "never",
        r"Expected all tensors to be on the same device|Input type \(.*\) and weight type",
        cause="Tensors of one operation are on different devices: a batch or a buffer was not moved to the rank's GPU.",
        fix="Move batch and model to the same device (cuda:LOCAL_RANK).",
    ),
)

_CHECKPOINT: Final = (
    _rule(
        "CKPT-lfs",
        "user-error",
        "never",
        r"Unsupported operand 118|invalid load key, 'v'",
        over=("CKPT-weights-only", "CKPT-truncated"),
        cause="The file is a Git LFS pointer (it begins with 'version https://git-lfs'), not the weights.",
        fix="Fetch the real file: git lfs install && git lfs pull.",
    ),
    _rule(
        "CKPT-lfs-safetensors",
        "user-error",
        "never",
        r"HeaderTooLarge|HeaderTooSmall|InvalidHeaderLength|invalid UTF-8 in header",
        cause="The file is not safetensors: a Git LFS pointer or an HTML page that was downloaded in place of the weights, or a cut-off file.",
        fix="Look at its first line (head -c 100 FILE) and size; fetch the real file: git lfs install && git lfs pull, or download it again.",
    ),
    _rule(
        "CKPT-html",
        "user-error",
        "never",
        r"Unsupported operand 60|invalid load key, '<'",
        over=("CKPT-weights-only", "CKPT-truncated"),
        cause="The file is an HTML page (a failed download or a login page), not the weights.",
        fix="Download it again and compare its size and checksum.",
    ),
    _rule(
        "CKPT-weights-only",
        "user-error",
        "never",
        r"Weights only load failed|Unsupported global|WeightsUnpickler error",
        cause="The checkpoint holds objects besides tensors, which torch.load refuses by default since torch 2.6 (weights_only=True).",
        fix="If you trust the file: torch.load(..., weights_only=False), or torch.serialization.add_safe_globals([...]); save plain values instead.",
    ),
    _rule(
        "CKPT-truncated",
        "user-error",
        "never",
        r"failed finding central directory|PytorchStreamReader failed|unexpected EOF, expected \d+ more bytes|Ran out of input|invalid load key|file might be corrupted|UnpicklingError|invalid header or archive is corrupted|MetadataIncompleteBuffer|storage has wrong byte size|PytorchStreamReader .{0,60}not found|InvalidHeaderDeserialization",
        cause="The checkpoint is damaged or cut off: the disk was full, or the job was killed while it was written.",
        fix="Use the checkpoint before it. Save to a temporary name and rename (ddpsafe.checkpoint does), and keep more than one.",
    ),
    _rule(
        "CKPT-prefix",
        "user-error",
        "never",
        r"(?:Unexpected|Missing) key\(s\).*\"(?:module|_orig_mod)\.",
        r"[\"'](?:module|_orig_mod)\.\S+[\"']",
        also=r"(?:loading state_dict|key\(s\) in state_dict|KeyError)",
        over=("CKPT-shape",),
        cause="The names of the checkpoint and the model differ by a prefix ('module.' of DDP, '_orig_mod.' of torch.compile).",
        fix="Save model.module.state_dict() (ctx.unwrap(model)), or strip the prefix when loading: torch.nn.modules.utils.consume_prefix_in_state_dict_if_present.",
    ),
    _rule(
        "CKPT-shape",
        "user-error",
        "never",
        r"size mismatch for |Missing key in checkpoint state_dict|Size mismatch between saved|doesn't match the size of optimizer's group|(?:Missing|Unexpected) key\(s\) in state_dict|loading state_dict for",
        cause="The checkpoint belongs to another model: names or shapes differ from the one that is built now.",
        fix="Build the model with the configuration it was saved with, or load with strict=False and see which names are left out.",
    ),
    _rule(
        "CKPT-pickled-class",
        "user-error",
        "never",
        r"Can't get attribute '[^']+' on <module|No module named '\S+'",
        also=r"torch\.load|load_checkpoint|torch/serialization\.py|_legacy_load|unpickler\.load",
        over=("MP-notebook", "ENV-module"),
        cause="The checkpoint holds a whole object (torch.save(model)), and its class is not importable under the same name here.",
        fix="Save model.state_dict() and load it into a model that the script builds; for this file, make the module importable under its old name.",
    ),
    _rule(
        "CKPT-race",
        "user-error",
        "once",
        r"Directory not empty|\[Errno 39\] |\[Errno 16\] Device or resource busy|\.nfs0\w+",
        cause="Several ranks (or jobs) remove or rename the same checkpoint directory at once, or a file in it is still open on another host.",
        fix="Let one rank save and clean up, with a barrier after it; give each job its own directory.",
    ),
    _rule(
        "CKPT-device",
        "user-error",
        "never",
        r"Attempting to deserialize object on",
        cause="The checkpoint was saved on a GPU that does not exist here.",
        fix="torch.load(..., map_location='cpu'), then load_state_dict.",
    ),
    _rule(
        "CKPT-directory",
        "user-error",
        "never",
        r"Parent directory .* does not exist",
        cause="torch.save does not create directories, and the one to save into does not exist.",
        fix="os.makedirs(folder, exist_ok=True) before saving.",
    ),
    _rule(
        "CKPT-tiny",
        "user-error",
        "never",
        r"OSError: \[Errno 22\] Invalid argument",
        cause="A file that was opened is cut off or empty (torch reports a checkpoint of a few bytes so), or the file system refuses the call.",
        fix="Look at the file's size (ls -l); use the checkpoint before it.",
    ),
)

_DATA: Final = (
    _rule(
        "DATA-forked-handle",
        "user-error",
        "never",
        r"(?i)wrong B-tree signature|bad symbol table node|bad object header|unable to open object|Unable to (?:synchronously )?(?:open|read).{0,60}(?:signature|addr overflow|message type|inflate)|filter returned failure",
        r"SSL error: decryption failed|SSL SYSCALL error|lost synchronization with server|SQLite objects created in a thread|database disk image is malformed",
        r"BadZipFile|Bad CRC-32|zlib\.error: Error -3|MDB_BAD_RSLOT|Bad magic number for (?:file header|central)",
        cause="An open file or connection (HDF5, lmdb, zip, a database) is shared by forked DataLoader workers, which disturb each other's reads.",
        fix="Open it in the worker, not in __init__: lazily in __getitem__, or with ddpsafe.data.PerProcess.",
    ),
    _rule(
        "MP-unpicklable-local",
        "unpicklable",
        "never",
        r"Can't pickle local object|Can't get local object|Can't pickle <function|attribute lookup .* failed|Can't pickle <class|not the same object as|PicklingError",
        cause="A lambda or a nested function or class has to be sent to another process and cannot be pickled.",
        fix="Define it at the top level of a module (functools.partial for arguments).",
    ),
    _rule(
        "MP-unpicklable-handle",
        "unpicklable",
        "never",
        r"(?i)can(?:not|'t) pickle '?(?:[\w.]*\.)?(?:Environment|_thread\.\w+|\w*lock\w*|_io\.\w+|\w*File\w*|\w*Connection\w*|\w*Cursor|generator|module|SSLContext|socket|\w+)'? objects?|h5py objects cannot be pickled|no default __reduce__",
        cause="The dataset or the arguments hold an object that cannot be sent to another process (an open file, a lock, a connection, a generator), as 'spawn' and 'forkserver' need.",
        fix="Open it in the worker (lazily, or with ddpsafe.data.PerProcess), and keep only plain values in the object.",
    ),
    _rule(
        "MP-notebook",
        "unpicklable",
        "never",
        r"Can't get attribute '[^']+' on <module '__(?:mp_)?main__'",
        cause="A class or function of a notebook or of __main__ is not there in the new process, which imports a fresh __main__.",
        fix="Put it into a module file and import it; ddpsafe.launch sends notebook functions by value.",
    ),
    _rule(
        "MP-main-guard",
        "config",
        "never",
        r"before the$|bootstrapping phase|freeze_support\(\)",
        cause="The script starts processes at its top level; with 'spawn' each new process imports the script and would start them again.",
        fix="Put the start under  if __name__ == '__main__':",
    ),
    _rule(
        "MP-daemonic",
        "config",
        "never",
        r"daemonic processes are not allowed to have children",
        cause="A daemonic process (of a Pool, or a worker) tried to start processes.",
        fix="Start the ranks from the main process, or use concurrent.futures.ProcessPoolExecutor for the outer level; num_workers=0 inside.",
    ),
    _rule(
        "MP-interactive",
        "config",
        "never",
        r"not compatible with an interactive environment|cannot be used in (?:a notebook|an interactive)",
        cause="The strategy starts fresh interpreters, which cannot run the code of a notebook.",
        fix="Use strategy='ddp_notebook' (or accelerate.notebook_launcher, ddpsafe.launch), or run it as a script.",
    ),
    _rule(
        "MP-path-too-long",
        "config",
        "never",
        r"AF_UNIX path too long",
        cause="The directory for temporary files (TMPDIR) has so long a path that the sockets of multiprocessing do not fit: a socket's path has 107 bytes.",
        fix="export TMPDIR=/tmp, or another short path.",
    ),
    _rule(
        "MP-grad-tensor",
        "user-error",
        "never",
        r"refusing to serialize non-leaf tensor|autograd's threading in combination with fork",
        cause="A tensor that is part of an autograd graph is passed to another process.",
        fix="Pass tensor.detach(), and create the model in the process that trains it.",
    ),
    _rule(
        "MP-context-set",
        "config",
        "never",
        r"context has already been set",
        cause="multiprocessing.set_start_method() was called twice.",
        fix="Call it once under the main guard, or pass mp.get_context('spawn') where it is needed.",
    ),
    _rule(
        "DATA-worker-timeout",
        "hang",
        "once",
        r"DataLoader timed out after",
        cause="A DataLoader worker delivered no batch within timeout=: a read that hangs (network storage) or a deadlock in the worker.",
        fix="Look at the storage; run with num_workers=0 to see the line; raise timeout= if the work is only slow.",
    ),
    _rule(
        "DATA-collate",
        "user-error",
        "never",
        r"stack expects each tensor to be equal size|each element in list of batch should be of equal size|Trying to resize storage that is not resizable|default_collate: batch must contain",
        cause="Samples of one batch have different shapes or types, and the default collate function cannot stack them.",
        fix="Pad or crop the samples, or pass a collate_fn.",
    ),
    _rule(
        "DATA-empty",
        "user-error",
        "never",
        r"num_samples should be a positive integer value, but got num_samples=0|num_samples=0",
        cause="The dataset is empty: a wrong path, a pattern that matches nothing, or a missing mount.",
        fix="Print the absolute path and len(dataset) on each rank, and check the mount in the container.",
    ),
    _rule(
        "DATA-file-lock",
        "user-error",
        "once",
        r"unable to lock file|No locks available|\[Errno 37\] |database is locked|FLOCK|Could not acquire lock|filelock.{0,20}Timeout",
        cause="A file cannot be locked: the file system has no locks (NFS, Lustre without flock), or another process holds it (HDF5 opened for writing, SQLite).",
        fix="HDF5: export HDF5_USE_FILE_LOCKING=FALSE and open it read-only; put caches and databases on a local disk, and write from one rank only.",
        over=("ENV-threads",),
    ),
    _rule(
        "DATA-download-race",
        "user-error",
        "once",
        r"not found or corrupted\. You can use download=True|invalid hash value \(expected|MD5 .{0,30}mismatch|NonMatchingChecksumError",
        cause="A download is missing, incomplete or damaged: often all ranks download the same file at once and read each other's parts.",
        fix="Delete it, and let one rank of each host download before the others read: with ctx.rank_zero_first(), or a barrier; or download before the job.",
    ),
    _rule(
        "DATA-last-batch",
        "user-error",
        "never",
        r"Expected more than 1 value per channel when training",
        cause="BatchNorm got a batch with a single sample: the last batch of the epoch on this rank.",
        fix="DataLoader(..., drop_last=True), or a batch size that leaves more than one sample for each rank.",
    ),
    _rule(
        "DATA-arguments",
        "user-error",
        "never",
        r"sampler option is mutually exclusive|expected unspecified \w+ option|could only be specified in multiprocessing|IterableDataset' has no len",
        cause="The arguments of the DataLoader contradict each other, or its kind of dataset.",
        fix="With a DistributedSampler leave shuffle out (and call sampler.set_epoch(epoch)); an IterableDataset takes no sampler and divides its data by rank and worker itself; ddpsafe.data.loader does both.",
    ),
    _rule(
        "DATA-pin-cuda",
        "user-error",
        "never",
        r"only dense CPU tensors can be pinned",
        cause="The dataset or the collate function returns tensors on the GPU, and pin_memory=True can pin CPU tensors only.",
        fix="Return CPU tensors and move the batch to the GPU in the loop; or pin_memory=False.",
    ),
    _rule(
        "DATA-path",
        "user-error",
        "never",
        r"No such file or directory|FileNotFoundError|NotADirectoryError",
        check=_is_no_info,
        cause="A path does not exist for this rank: it is relative to another directory, or not mounted on this host or in this container.",
        fix="Use absolute paths, and check the path on every host (ls -ld PATH); ddpsafe.DataPath checks it before the start.",
    ),
    _rule(
        "DATA-permission",
        "user-error",
        "never",
        r"PermissionError|\[Errno 13\] Permission denied",
        cause="The process may not read or write a path.",
        fix="Check owner and mode along the path: namei -l PATH; in a container, the user id.",
    ),
    _rule(
        "DATA-mkdir-race",
        "user-error",
        "yes",
        r"FileExistsError|\[Errno 17\] File exists",
        cause="Several ranks created the same directory or file at the same moment.",
        fix="os.makedirs(path, exist_ok=True), or let rank 0 alone create it, before a barrier.",
    ),
    _rule(
        "DATA-corrupt",
        "user-error",
        "never",
        r"cannot identify image file|image file is truncated|Corrupt JPEG|tarfile\.ReadError|broken data stream|ended before the end-of-stream marker|ArrowInvalid|magic bytes not found|Not a gzipped file|incorrect data check|DatasetGenerationError|incorrect header check",
        cause="A file of the dataset is damaged or cut off.",
        fix="Find it (num_workers=0 shows the sample), and fetch it again or skip it.",
    ),
    _rule(
        "DATA-noise-del",
        "network",
        "yes",
        r"Exception ignored in: .*DataLoaderIter\.__del__",
        over=("PEER-lost", "USER-exception"),
        cause="An iterator was destroyed while workers still held batches; Python ignores the exception, and the training goes on.",
        fix="Nothing, if the training ran to its end; keep the iterator until the workers have finished, or persistent_workers=True.",
        level="noise",
    ),
)

_ENDS: Final = (
    _rule(
        "END-sighup",
        "preempted",
        "yes",
        r"closing signal SIGHUP|got signal: 1\b|Received 1 death signal|signal (?:1|SIGHUP)\b.{0,20}(?:received|Hangup)|\bHangup\b",
        cause="The terminal or the ssh session that started the job was closed (SIGHUP); torchrun installs its own handler, so nohup does not protect it.",
        fix="Start it in tmux or screen, with setsid, or under a scheduler.",
    ),
    _rule(
        "END-time-limit",
        "preempted",
        "yes",
        r"DUE TO TIME LIMIT|walltime .* exceeded|DeadlineExceeded|TERM_RUNLIMIT|reaching LSF run time limit",
        cause="The scheduler ended the job at its time limit.",
        fix="Ask for more time (--time), or save before it: --signal=USR1@300 and resume from the checkpoint.",
    ),
    _rule(
        "END-preempted",
        "preempted",
        "yes",
        r"DUE TO PREEMPTION|DUE TO JOB REQUEUE|NodeNotReady|TaintManagerEviction|Preempted|spot instance (?:interruption|termination)|node .*(?:preempt|NODE_FAIL|DUE TO NODE FAILURE)|NODE FAILURE|Evicted|NodeDiedError|TERM_PREEMPT|maintenance event|node .{0,30}(?:was|is) (?:shut down|terminated|dead)",
        cause="The scheduler or the cloud took the node away.",
        fix="Start again and resume from the last checkpoint (--requeue, a Job with backoffLimit).",
    ),
    _rule(
        "END-cancelled",
        "preempted",
        "once",
        r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED|CANCELLED AT",
        cause="The job was cancelled, or its step ended because one task failed (srun --kill-on-bad-exit).",
        fix="Look above for the task that failed first; if there is none, a person or the scheduler cancelled it.",
        level="symptom",
    ),
    _rule(
        "END-sigterm",
        "preempted",
        "yes",
        r"got signal: 15\b|closing signal SIGTERM|Received 15 death signal|(?i:exit ?code:?) +143\b|exits with return code = -15|died with <Signals\.SIGTERM|is killed by signal: Terminated",
        cause="The launcher was asked to stop with SIGTERM: by a scheduler, a container's stop, or because another rank had failed.",
        fix="Look for a rank that failed before; if there is none, see who stopped the job, and resume from the checkpoint.",
        level="symptom",
    ),
    _rule(
        "END-interrupted",
        "preempted",
        "yes",
        r"^KeyboardInterrupt|got signal: 2\b|Received 2 death signal|(?i:exit ?code:?) +130\b|SIGINT",
        cause="Ctrl-C, or the SIGINT of a notebook or a scheduler, ended the job.",
        fix="Nothing, if it was meant. If it was ended because it hung, look at where the ranks were: the tracebacks show it.",
        level="symptom",
    ),
    _rule(
        "END-at-exit",
        "user-error",
        "yes",
        r"terminate called without an active exception",
        cause="The process ended without destroy_process_group(): gloo's threads were still alive when Python shut down, so a finished job exits with SIGABRT now and then.",
        fix="Call dist.destroy_process_group() at the end (ddpsafe does), and join your own threads.",
    ),
    _rule(
        "END-sigsegv",
        "killed",
        "never",
        r"SIGSEGV|Segmentation fault|exitcode ?: -11|signal 11\b|Signal 11 \(|SIGNAL: 11\b|(?i:exit ?code:?) +139\b|return code = -11\b",
        cause="A process crashed in native code (SIGSEGV): an extension, a driver, or mixed library versions.",
        fix="Run with python -X faulthandler for the Python stack; check versions of torch, CUDA and extensions.",
        level="end",
    ),
    _rule(
        "END-sigbus",
        "killed",
        "never",
        r"SIGBUS|exitcode ?: -7\b|signal 7\b|Signal 7 \(|Bus error",
        cause="A process got SIGBUS: /dev/shm is full (64 MB in a container by default), or a mapped file was cut off or its disk is full.",
        fix="Enlarge /dev/shm (docker run --shm-size=8g), check the disk of mapped files.",
        level="end",
    ),
    _rule(
        "END-sigkill",
        "killed",
        "once",
        r"exitcode ?: -9|signal SIGKILL|Signal 9 \(|Signal 9\b|(?:^|: |\(|\d )Killed(?:\)|\s*$|\s{2,})|exit(?:ed with|ed| code|code)? (?:code )?137|killed by signal 9|KILLED BY SIGNAL: 9\b|\bby SIGKILL\b|return code = -9\b|Signals\.SIGKILL|exited on signal 9\b|(?i:exit ?code:?) +137\b",
        cause="A process was killed with SIGKILL. It leaves no traceback; nearly always the kernel's out-of-memory killer or a container's memory limit did it.",
        fix="See dmesg or `journalctl -k | grep -i oom` on its host, and memory.events of the cgroup; lower num_workers or the batch, or raise the limit.",
        level="end",
    ),
    _rule(
        "END-sigabrt",
        "killed",
        "once",
        r"SIGABRT|SIGNAL: 6\b|(?i:exit ?code:?) +134\b|return code = -6\b|exitcode ?: -6\b|signal 6\b|Signal 6 \(|Aborted \(core dumped\)",
        cause="A process aborted itself (SIGABRT): a failed assertion in native code, NCCL's watchdog, or collectives of different sizes under gloo.",
        fix="Read the last lines that it wrote to stderr; they name the assertion.",
        level="exit",
    ),
    _rule(
        "END-sigill",
        "killed",
        "never",
        r"SIGILL|Illegal instruction|exitcode ?: -4\b",
        cause="A library was built for another processor (illegal instruction).",
        fix="Install builds for this machine's processor, and compile extensions on it.",
        level="end",
    ),
    _rule(
        "DATA-worker-signal",
        "killed",
        "once",
        r"DataLoader worker .*is killed by signal: (?P<signal>(?!Killed|Bus|Segm|Termin)[\w ]+)",
        cause="A DataLoader worker crashed in native code ({signal}): a library of the dataset, such as a decoder.",
        fix="Run with num_workers=0 and python -X faulthandler, which shows the line; set cv2.setNumThreads(0) or the like in workers.",
        level="end",
    ),
    _rule(
        "DATA-worker-exit",
        "user-error",
        "never",
        r"DataLoader worker .*exited unexpectedly|Pin memory thread exited unexpectedly",
        cause="A DataLoader worker ended by itself; its own error stands above it or was lost.",
        fix="Run with num_workers=0, which shows the error and its line.",
        level="end",
    ),
    _rule(
        "END-exit-code",
        "user-error",
        "never",
        r"(?:terminated with exit code|failed \(exitcode:|exitcode ?:|Exited with exit code|exits with return code =|returned non-zero exit status|with non-zero status|terminated with code|(?i:exit ?code:)) +(?!(?:130|143)\b)(?P<code>[1-9]\d*)\b",
        cause="A rank ended with exit code {code}; the reason stands in its own output.",
        fix="Read that rank's log above the summary (torchrun --log-dir D --tee 3 keeps one for each rank).",
        level="exit",
    ),
)

_SYMPTOMS: Final = (
    _rule(
        "HANG-watchdog",
        "hang",
        "once",
        r"Watchdog caught collective operation timeout|collective operation timeout: WorkNCCL|dump signal due to a collective timeout(?: from rank (?P<rank>\d+))?|Some NCCL operations have failed or timed out|Timeout at (?:NCCL|collective)|failure detected by watchdog|detected by watchdog at work",
        cause="A collective did not end within the timeout: a rank did not take part in it (other control flow, other batch counts, long work, a crash) or took part in another one.",
        fix="Find the rank with the lowest SeqNum, or the one that is missing here, and see what it did; give all ranks the same number of batches (drop_last, DistributedSampler, Join).",
        level="symptom",
    ),
    _rule(
        "HANG-timeout",
        "hang",
        "once",
        r"Timed out waiting \d+ms for (?:recv|send)|[Tt]imeout waiting for key|Application timeout caused pair closure|failed to pass monitoredBarrier|monitoredBarrier|wait timeout after \d+ ?ms|Socket Timeout|timed out in blocking wait|(?i:CollectiveTimeoutError|BarrierTimeoutError)|waitForInput",
        cause="A rank waited for another one that did not come: it is slower, hangs, took another branch, or has ended.",
        fix="Compare where the ranks were (py-spy dump --pid PID, or ddpsafe's own report); let all ranks call the same collectives in the same order.",
        level="symptom",
    ),
    _rule(
        "HANG-watchdog-stuck",
        "hang",
        "once",
        r"watchdog got stuck for|heartbeat monitor.{0,80}(?:terminat|timed out)|watchdog hang",
        cause="NCCL's watchdog thread itself hung in a CUDA call, or could not get the GIL; it follows a collective timeout or a stuck GPU.",
        fix="Look at the first timed-out collective above; check the GPUs (nvidia-smi, dmesg).",
        level="symptom",
    ),
    _rule(
        "NCCL-guess-device",
        "hang",
        "never",
        r"best-guess GPU|devices used by this process are currently unknown",
        cause="The rank has not said which GPU it uses, and a barrier guesses it; a wrong guess hangs.",
        fix="init_process_group(..., device_id=torch.device('cuda', local_rank)) after set_device(local_rank).",
        level="symptom",
    ),
)

_PEERS: Final = (
    _rule(
        "PEER-aborted",
        "peer-lost",
        "once",
        r"what\(\):.*(?:Connection closed by peer|reset by peer|Broken pipe|remote process exit)",
        cause="Another rank ended or lost its connection, and a thread of this one ended the process because of it.",
        fix="Look at the logs of the other ranks for the first error; if none has one, see dmesg for the out-of-memory killer, then check the network.",
        level="peer",
        over=("END-sigabrt", "PEER-lost"),
    ),
    _rule(
        "PEER-lost",
        "peer-lost",
        "once",
        r"(?i)Connection closed by (?:remote )?peer|Connection reset by peer|Broken pipe|socketProgress|ncclRemoteError|remote process exit|NCCL communicator was aborted|DistNetworkError|recvValue failed|TCPStore server has shut down|Failed to (?:check|recv)|recv failed while polling|Could not receive type from localRank|remotely closed|failed to recv|ECONNRESET|remote process exited|Error encountered progressing operation",
        over=("NCCL-error",),
        cause="Another rank ended or lost its connection; this rank only noticed it.",
        fix="Look at the logs of the other ranks for the first error; if none has one, see dmesg for the out-of-memory killer, then check the network.",
        level="peer",
    ),
    _rule(
        "NCCL-error",
        "network",
        "once",
        r"DistBackendError|NCCL error in: |(?i:NCCL error \d|NCCL error:)|ncclInternalError|ncclUnhandledCudaError|ncclSystemError|unhandled (?:system|cuda) error",
        cause="A call of NCCL failed; this line does not say why: a connection, shared memory, a device, or a peer that ended.",
        fix="Run again with NCCL_DEBUG=WARN (INFO for the whole set-up): the line 'NCCL WARN' before the error names the reason.",
        level="peer",
    ),
    _rule(
        "PEER-childfailed",
        "user-error",
        "once",
        r"ChildFailedError|ProcessRaisedException|ProcessExitedException|CalledProcessError|ActorDiedError|ActorUnavailableError|RayActorError|WorkerCrashedError|TrainingFailedError|worker process has died|A worker died or was killed|Child process with PID \d+ terminated",
        cause="A rank failed; this is its launcher's summary.",
        fix="Read the log of the rank that it names as first.",
        level="peer",
    ),
)

_REPORT: Final = _rule(
    "RUN-report",
    "user-error",
    "once",
    cause="{what}. Likely cause: {cause}.",
    fix="{fix}.",
)
"""What ddpsafe's own report of a run says: its cause, fix and kind are taken as they are there."""

_TIMED_OUT: Final = ("HANG-watchdog", "HANG-timeout", "HANG-watchdog-stuck", "NCCL-error")
"""What a log says when a collective took too long, and recordings say better."""

_FLIGHT: Final = (
    _rule(
        "FLIGHT-mismatch",
        "user-error",
        "never",
        cause="In collective number {number} of group {group}, rank {rank} calls {call}. Of {waiting} it is {usual}: they wait for each other for ever.",
        fix="Let every rank call the same collectives with the same shapes, in the same order; look at what those two lines depend on (the rank, the data, an exception).",
        over=_TIMED_OUT,
    ),
    _rule(
        "FLIGHT-missing",
        "hang",
        "once",
        cause="The others wait for {missing}, which never called {call} of group {group}. In it: {waiting}.",
        fix="Look at what comes after the last call of {missing}: an end of its data, another branch, long work, or an exception; give all ranks the same number of steps.",
        level="symptom",
        over=_TIMED_OUT,
    ),
    _rule(
        "FLIGHT-no-dump",
        "hang",
        "once",
        cause="There is no recording of {missing}. Waiting in {call} of group {group}: {waiting}. It ended without one, or its file is missing here.",
        fix="Look at the log and the exit code of {missing} first; collect the files of all hosts (TORCH_NCCL_DEBUG_INFO_TEMP_FILE).",
        level="symptom",
        over=_TIMED_OUT,
    ),
    _rule(
        "FLIGHT-not-started",
        "hang",
        "once",
        cause="All ranks called {call} of group {group}, and on {missing} the GPU has not begun it: an earlier kernel of its stream does not end.",
        fix="Look at the GPU of {missing} (nvidia-smi, dmesg for Xid), and at collectives of two groups that run on one GPU at the same time.",
        level="symptom",
        over=_TIMED_OUT,
    ),
    _rule(
        "FLIGHT-stuck",
        "network",
        "once",
        cause="All ranks are in {call} of group {group}, with the same shapes, and it does not end: the network or a GPU hangs, not the script.",
        fix="Check links and GPUs (ibstat, dmesg for Xid, nvidia-smi); NCCL_DEBUG=INFO shows the transport; `ddpsafe doctor` tries all pairs of hosts.",
        level="symptom",
        over=_TIMED_OUT,
    ),
)
"""What flight recordings show; they have no line in a log."""

_NOISE: Final = (
    _rule(
        "NOISE-ipv6",
        "startup-network",
        "never",
        r"errno: 97\b|Address family not supported by protocol",
        cause="IPv6 is turned off on this host; torch tries it first and goes on with IPv4. This alone is not a failure.",
        fix="Nothing; look for another error. MASTER_ADDR as an IPv4 address avoids the warning.",
        level="noise",
    ),
    _rule(
        "NOISE-not-destroyed",
        "user-error",
        "never",
        r"process group has NOT been destroyed|destroy_process_group\(\) was not called",
        cause="The program ended without destroy_process_group(); a reminder, not the failure.",
        fix="Call dist.destroy_process_group() at the end of the script.",
        level="noise",
    ),
    _rule(
        "NOISE-leaked",
        "user-error",
        "never",
        r"leaked (?:semaphore|shared_memory) objects|leaked semaphores",
        cause="A process ended before it could remove its semaphores; a consequence of its end.",
        fix="Look for what ended it.",
        level="noise",
    ),
    _rule(
        "NOISE-omp",
        "user-error",
        "never",
        r"Setting OMP_NUM_THREADS environment variable for each process to be 1|Failed to open libibverbs|libnccl-net\.so|suggested max number of worker",
        cause="A notice, not a failure.",
        fix="Nothing; look for another error.",
        level="noise",
    ),
)

RULES: Final[tuple[Rule, ...]] = (
    *_HARDWARE,
    *_MEMORY,
    *_DISK,
    *_DDP,
    *_CHECKPOINT,
    *_ENVIRONMENT,
    *_NCCL,
    *_GLOO,
    *_RENDEZVOUS,
    *_CUDA,
    *_DATA,
    *_ENDS,
    *_SYMPTOMS,
    _REPORT,
    *_FLIGHT,
    *_PEERS,
    *_NOISE,
)
"""Every rule, the more specific one first within a level."""


_PAGE_HEAD: Final = """\
# Failures that `ddpsafe explain` knows

Generated from the catalogue in `ddpsafe/_explain/rules.py`.
`retry` says whether starting the job again can help: `never`, `once`, `yes`, or `elsewhere`, which is on other hardware only.
"""

_PAGE_REPORT: Final = """
## DS-RUN-report

- Cause: the one that `report.json` of a run directory of ddpsafe names, with its rank, its kind and what to do.
"""

_PAGE_USER: Final = """
## DS-USER-exception

- Cause: the script raised an exception that is none of the others.
- What to do: fix the line that the finding names; ranks that complain of a lost peer failed because of it.
- Kind `user-error`, retry `never`.
"""


def as_page() -> str:
    """Return the page of the documentation on all rules, as Markdown."""
    parts = [_PAGE_HEAD]
    for rule in RULES:
        if rule is _REPORT:
            parts.append(_PAGE_REPORT)
            continue
        cause, fix = (re.sub(r"\{(\w+)\}", r"…", text) for text in (rule.cause, rule.fix))
        parts.append(
            f"\n## {rule.code}\n\n- Cause: {cause}\n- What to do: {fix}\n"
            f"- Kind `{rule.kind}`, retry `{rule.retry}`.\n"
        )
    return "".join(parts) + _PAGE_USER
