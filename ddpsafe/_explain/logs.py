"""Reads logs of any launcher and any size, and ranks the known failures found in them.

A log is read once, in chunks. Most lines of any log differ from earlier ones only in digits; of
those, only the first few are matched. For the others, a rule's patterns are tried only if the line
has a literal part of them. In a large log, numpy finds these lines without a Python loop over all.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._explain.rules import (
    KINDS_OF_EXCEPTIONS,
    LEVELS,
    RULES,
    STAGES_OF_EXCEPTIONS,
    Level,
    LogRule,
    Retry,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from typing import BinaryIO

    from ddpsafe._errors import FailureKind
    from ddpsafe._explain.flight import RecordedFailure

_CHUNK_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 4_000
_MAX_SAME_LINES: Final = 3
"""How many lines that differ only in digits are matched: a loop prints the same one for hours."""
_MAX_SHAPES: Final = 50_000
"""How many lines without their digits are remembered, to bound the memory."""
_MAX_EVIDENCE: Final = 3
_MAX_EVIDENCE_CHARS: Final = 400
_SMALL_BYTES: Final = 1 << 16
"""Smaller chunks are read line by line, which takes less time than importing numpy."""
_MAX_CALLS: Final = 20_000
"""How many calls of tracebacks are read; none after the script's own exception is known. They show
only where it was raised, and reading all of them nearly doubled the time for a log of tracebacks."""
_MAX_CALLS_OF_TRACEBACK: Final = 50
"""How many of a traceback's last calls are kept, to find out what the script was doing."""
_MAX_LINES_AFTER_CALL: Final = 200
"""How many lines after a traceback's last call its exception may follow."""

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
_ANSI_BYTES: Final = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\n]*\x07")
_CONTROL_BYTES: Final = bytes(each for each in (*range(32), 127) if each not in b"\t\n")
_RANK: Final = re.compile(
    # Every alternative begins with one of these: one quick check instead of trying them all.
    r"(?=[\[\drRlLp:])(?:"
    r"\[rank(?P<a>\d+)\]|\[Rank (?P<b>\d+)\]|\[default(?P<c>\d+)\]|^(?P<d>\d{1,5}): "
    r"|^\[1,(?P<e>\d+)\]<std|(?i:\blocal_rank: ?(?P<local>\d+))|\brank\s*: ?(?P<g>\d+)\b"
    r"|\bprocess (?P<h>\d+) terminated|\bRank (?P<i>\d+)\]|^rank-?(?P<j>\d+)[ :|]"
    r"|: task (?P<k>\d+): |\bprocess rank (?P<l>\d+) with PID|\bRANK (?P<m>\d+) PID)"
)
_RANK_WORDS: Final = ("rank", "Rank", "RANK", "[default", "[1,", "process ", ": task ")
_PREFIX: Final = re.compile(
    r"^(?:\[(?:rank|default)\d+\]:?\s*|\[1,mpirank:\d+,algo-\d+\]<std\w+>:\s?|(?:[\w.]+ )?- (?:[\w.]+ - )?(?:ERROR|INFO|WARNING) - |\[1,\d+\]<std\w+>:\s?|\d{1,5}: |[\w.-]+\s+[|│] ?"
    r"|\(\w+ pid=\d+(?:, ip=[\d.]+)?\)\s*|\[[\d\-T:., ]+\]\s*|\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\s*(?:- (?!(?:ERROR|INFO|WARNING) - ))?"
    r"|[IWEF]\d{4} [\d:.]+ +\d+ \S+:\d+\] ?|\[(?:ERROR|WARNING|INFO|DEBUG)\]\s*"
    r"|(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\s+(?:\d\d-\d\d [\d:]{8} \[?[\w./-]+:\d+\]|[\w./-]+:\d+ --) ?"
    r"|\[pod/\S+\] ?|> |[a-z][\w.-]*\d: (?=\S)|std(?:out|err) [FP] )+"
)
_DECORATION: Final = re.compile(
    r"""
        [^\w\[(]+                             # indentation, quotes, back-ticks, a box
      | [\[(][^\])]{1,60}[\])]:?\s*           # [ERROR], [2026-11-22 10:11:12], (pid=4711)
      | \d[\d:.,T-]{4,30}Z?\s+                # a date, a time
      | [\w.:/-]+:\d+:?\s+                    # main.py:12:
      | (?:E|(?i:error|critical|fatal|stderr|failed|traceback|(?:un)?caught|exception|original|was))
        (?:\s|:(?:[\w.]+:)?\s*)               # ERROR:root:, of pytest E
      | __main__\s?
      | (?i:rank|worker|process)[ -]?\d+(?:\ failed)?:\s
    """,
    re.VERBOSE,
)
"""One piece of what loggers, pytest, boxes and pastes put before an exception."""
_MAX_DECORATIONS: Final = 12
_DECORATED: Final = re.compile(
    r"""(?:(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)|StopIteration)"""
    r"""|_?queue\.(?:Empty|Full))(?:: |:?[\s`'"*│]*$)"""
)
_EXCEPTION_WORDS: Final = ("rror", "xception", "StopIteration", "queue.", "Interrupt", "Timeout")
"""Every line that `_DECORATED` matches has one of these."""
_ENGLISH: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            *("Kommando nicht gefunden", "Befehl nicht gefunden", "commande introuvable"),
            *("orden no encontrada", "no se encontró la orden", "comando non trovato"),
            *("comando não encontrado", "команда не найдена", "未找到命令", "找不到指令"),
            *("コマンドが見つかりません", "명령을 찾을 수 없습니다", "Command not found."),
        ),
        "command not found",
    ),
    **dict.fromkeys(
        (
            *("Datei oder Verzeichnis nicht gefunden", "Aucun fichier ou dossier de ce type"),
            *("No existe el fichero o el directorio", "No existe el archivo o el directorio"),
            *("File o directory non esistente", "Arquivo ou diretório inexistente"),
            *("Нет такого файла или каталога", "没有那个文件或目录", "沒有此一檔案或目錄"),
            *("そのようなファイルやディレクトリはありません", "그런 파일이나 디렉터리가 없습니다"),
        ),
        "No such file or directory",
    ),
    **dict.fromkeys(
        (
            *("Keine Berechtigung", "Permission non accordée", "Permiso denegado", "权限不够"),
            *("Permesso negato", "Permissão negada", "Отказано в доступе", "許可がありません"),
            "허가 거부",
        ),
        "Permission denied",
    ),
    **dict.fromkeys(
        (
            *("Auf dem Gerät ist kein Speicherplatz mehr verfügbar", "设备上没有空间"),
            *("Aucun espace disponible sur le périphérique", "No queda espacio en el dispositivo"),
        ),
        "No space left on device",
    ),
    **dict.fromkeys(
        (
            *("Speicherzugriffsfehler", "Erreur de segmentation", "Violación de segmento"),
            *("段错误", "記憶體區段錯誤", "Ошибка сегментирования", "セグメンテーション違反"),
        ),
        "Segmentation fault",
    ),
    **dict.fromkeys(
        ("Getötet", "Processus arrêté", "Terminado (killed)", "已杀死", "已砍掉", "Убито"), "Killed"
    ),
    **dict.fromkeys(("已放弃", "Аварийный останов", "Abgebrochen"), "Aborted"),
    **dict.fromkeys(("核心已转储", "吐核", "Speicherabzug geschrieben"), "core dumped"),
    **dict.fromkeys(
        ("拒绝连接", "Verbindungsaufbau abgelehnt", "Connexion refusée"), "Connection refused"
    ),
    **dict.fromkeys(
        ("无法分配内存", "Nicht genügend Hauptspeicher verfügbar"), "Cannot allocate memory"
    ),
    **dict.fromkeys(
        (
            *("不是内部或外部命令", "ist entweder falsch geschrieben oder"),
            *("n'est pas reconnu en tant que commande", "no se reconoce como un comando interno"),
        ),
        "is not recognized as an internal or external command",
    ),
    "总线错误": "Bus error",
    "资源暂时不可用": "Resource temporarily unavailable",
    "打开的文件过多": "Too many open files",
}
"""Messages of shells and the C library about errors and signals, in languages of users' logs."""
_ASCII_ENGLISH: Final = {text: english for text, english in _ENGLISH.items() if text.isascii()}
_CUDA_ERRORS: Final[dict[str, str]] = {
    name: message
    for message, names in (
        ("invalid argument", "invalidvalue 1"),
        ("out of memory", "memoryallocation outofmemory 2"),
        ("initialization error", "initializationerror notinitialized 3"),
        ("driver shutting down", "cudartunloading deinitialized"),
        ("invalid configuration argument", "invalidconfiguration"),
        ("CUDA driver is a stub library", "stublibrary 34"),
        (
            "CUDA driver version is insufficient for CUDA runtime version",
            "insufficientdriver callrequiresnewerdriver 35",
        ),
        (
            "all CUDA-capable devices are busy or unavailable",
            "devicesunavailable deviceunavailable devicealreadyinuse 46",
        ),
        ("invalid device function", "invaliddevicefunction 98"),
        ("no CUDA-capable device is detected", "nodevice 100"),
        ("invalid device ordinal", "invaliddevice 101"),
        ("device kernel image is invalid", "invalidkernelimage invalidimage 200"),
        ("invalid device symbol", "invalidsymbol"),
        (
            "no kernel image is available for execution on the device",
            "nokernelimagefordevice nobinaryforgpu 209",
        ),
        ("uncorrectable ECC error encountered", "eccuncorrectable 214"),
        (
            "peer access is not supported between these two devices",
            "peeraccessunsupported mapbufferobjectfailed mapfailed",
        ),
        ("a PTX JIT compilation failed", "invalidptx 218"),
        ("uncorrectable NVLink error detected during the execution", "nvlinkuncorrectable 220"),
        ("PTX JIT compiler library not found", "jitcompilernotfound"),
        (
            "the provided PTX was compiled with an unsupported toolchain",
            "unsupportedptxversion jitcompilationdisabled 222",
        ),
        ("shared object initialization failed", "sharedobjectinitfailed"),
        ("OS call failed or operation not supported on this OS", "operatingsystem 304"),
        ("invalid resource handle", "invalidresourcehandle invalidhandle 400"),
        ("an illegal memory access was encountered", "illegaladdress 700 77"),
        ("too many resources requested for launch", "launchoutofresources 701"),
        ("the launch timed out and was terminated", "launchtimeout 702"),
        ("peer access is already enabled", "peeraccessalreadyenabled 704"),
        ("context is destroyed", "contextisdestroyed"),
        ("device-side assert triggered", "assert 710 59"),
        ("hardware stack error", "hardwarestackerror 714"),
        ("an illegal instruction was encountered", "illegalinstruction invalidpc 715"),
        ("misaligned address", "misalignedaddress invalidaddressspace 716"),
        ("unspecified launch failure", "launchfailure launchfailed 719"),
        ("too many blocks in cooperative launch", "cooperativelaunchtoolarge"),
        ("operation not permitted", "notpermitted 800"),
        ("operation not supported", "notsupported 801"),
        ("system not yet initialized", "systemnotready 802"),
        (
            "system has unsupported display driver / cuda driver combination",
            "systemdrivermismatch 803",
        ),
        (
            "forward compatibility was attempted on non supported HW",
            "compatnotsupportedondevice 804",
        ),
        ("unknown error", "unknown 999 30"),
    )
    for name in names.split()
}
"""CUDA's message of an error, by its runtime and driver names without underscores, and its number."""
_CUDA_NAME: Final = re.compile(
    r"(?<![=!(|&] )(?<![=!(|&])\b(?:cudaError_?|hipError_?|CUDA_ERROR_)(?P<name>[A-Z]\w{2,40})\b(?!\s*[|&)]{2})"
    r"|\b(?i:cuda(?: ?(?:driver|runtime|execution))?(?: api)?(?: failed with)?) ?(?i:error|failure)(?: code)?[:= ]{0,3}\(?(?P<number>\d{1,3})\)?(?=$|[\s.,;)])"
)
"""The name of a CUDA error in a program's output, but not in source code that compares with it."""
_ZSH: Final = re.compile(
    r"^(?:zsh(?::\d+)?: |(?:\[\d+\] +[-+]? *)?\d+ )(?:(?P<what>command not found|permission denied|no such file or directory): (?P<name>.+)"
    r"|(?P<signal>killed|segmentation fault|abort|bus error|terminated|illegal hardware instruction|floating point exception)(?P<core>(?: \(core dumped\))?) {2,}.+)"
)
_OS_ERROR: Final = re.compile(
    r"(?:(?P<windows>(?:Access is denied|The )[^():]{0,90}|[^\x00-\x7f:]{2,60})|(?P<text>[A-Za-z][\w '/-]{0,60}))"
    r" ?\(os error (?P<number>\d+)\)"
)
"""How programs written in Rust, such as safetensors and tokenizers, print an OS error."""
_ERRNO_DIGITS: Final = 3
_OS_OF_RUST: Final = re.compile(r'Os \{ code: (\d+), kind: \w+, message: "([^"]{1,120})" \}')
"""The same in Rust's debug format."""
_WORLD_SIZE: Final = re.compile(r" \(world_size \d+\)")
_CLASS: Final = re.compile(
    r"(?<!pickle )<class '([\w.]{1,120}(?:Error|Exception))'>(?:: | --> |, | - | )(?=\S)"
)
"""The repr of an exception's class before the exception's text."""
_BASH_MESSAGES: Final = {
    "permission denied": "Permission denied",
    "no such file or directory": "No such file or directory",
    "abort": "Aborted",
    "illegal hardware instruction": "Illegal instruction",
}
"""bash's messages, by zsh's, where they differ."""
_HEDGE: Final = re.compile(
    r"There are some potential root causes.*|\bkilled by SIGKILL by OOM killer due to high|crashed unexpectedly due to SIGSEGV or"
)
"""Ray's list of possible causes, which names SIGKILL and SIGSEGV whatever happened."""
_WARNING: Final = re.compile(
    r"^.{0,60}?(?:\[W\d* |\[W \w|(?:^|[\]\s:])W\d{4} |(?<![=_\w])WARN(?:ING)?(?<!NCCL WARN)\b|Warning: |(?:^|[\]\s:])W (?=[\w.]+/)"
    r"|\S{1,300}\.py:\d+: \w*Warning: "
    r"|.{0,120}cuda_(?:driver|executor)\.cc:\d+\] failed to allocate "  # it tries again with less
    r"|(?P<info>\[I\d* |\[I \w|(?:^|[\]\s:])I\d{4} |(?<![=_\w])(?:INFO|DEBUG)\b))"
)
"""A line that its program marks as less than an error, so it proves less."""
_RAISED: Final = re.compile(r"\b[A-Z]\w*(?:Error|Exception): ")
"""An exception. Some launchers print their ranks' stderr as INFO, so it counts there, too."""
_PROGRESS: Final = re.compile(
    r"(?i)\b(?:epoch|step|iter(?:ation)?)\b[\s:=#\[]*\d|\bloss\b['\"]?[\s:=]{1,3}\d|\d ?(?:it/s|s/it)\b|\d%\|"
    r"|\b(?:saved|wrote) (?:\w+ )?checkpoint|checkpoint saved|max_(?:epochs|steps)\S* reached"
    r"|training (?:is |was )?(?:completed?|finished|done)\b|exits successfully|\d+ passed\b"
)
"""What a run prints that makes progress or has succeeded: a warning before it was harmless."""
_TAIL_BYTES: Final = 4096
_PASSED_TEST: Final = re.compile(
    # Atomic, up to the first "::": backtracking over each takes minutes in a line full of them.
    r"^(?=(.*?::\S))\1.* (?:PASSED|SKIPPED|XFAIL|XPASS)\b|^(?:PASSED|SKIPPED|XFAIL) "
)
"""A passed or skipped test, whose name may mention the failure that it provokes."""
_EXCEPTION: Final = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Fault|Timeout)|Exception|(?<=\.)Error))"
    r"(?:: (?P<text>.*)|:?\s*)$"
)
_QUOTED: Final = re.compile(
    r"(?<![\w.])(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): (?P<text>\S.{4,})$"
)
"""An exception at the end of a sentence, as in titles and summaries."""
_LOGGED: Final = re.compile(
    r"(?:^|[\s\[|])(?:ERROR|FATAL|CRITICAL)(?![\w=])(?:[\]:|\s-]|[\w./]{1,60}:\d{1,6}:?\s){0,6}(?P<text>[A-Za-z`'\"].{11,300})"
)
"""A message that a logger marks as an error."""
_ASSERTION: Final = re.compile(r"^[\s`*]*(assert (?=.*[<>=(\[%.])[\w(\[].{5,300}?)[`*]*$")
"""An assertion quoted without its exception."""
_MAX_QUOTED_LINE: Final = 3
"""Up to this line an assertion is taken for a quote; further down a program may print source."""
_NO_ATTRIBUTE: Final = re.compile(
    r"^(?:[\s`*\"]*|AttributeError [\w .]{1,60}: *)(?='\w{1,80}' object has no attribute '\w)"
)
"""An error quoted without its class, as in titles."""
_RECORD: Final = re.compile(
    r"""^\{(?:"(?:stream|time|timestamp|ts|level|severity|logger|name)": ?"[^"]{0,80}", ?){0,8}"""
    r"""(?:"(?:log|message|msg|textPayload)": ?")(?P<text>(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*)\""""
)
"""A JSON line as Docker, Kubernetes and structured loggers write it."""
_FRAME: Final = re.compile(
    r'^(?:E|\|)?\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)'
    r"|^│ (?P<file2>[^│\s]+\.py):(?P<line2>\d+) in (?P<function2>\w+)"
    r"|^File (?P<file3>(?:[A-Za-z]:)?[^\s:]+\.py):(?P<line3>\d+), in (?P<function3>\w+)"
    r"|^(?P<file4>(?:~|/|[A-Za-z]:\\)[^\s:]+\.pyc?)(?P<line4>) in (?P<function4>\w+)\("
)
"""A call as printed by Python, rich (in a box) and IPython; old ones have the number below it."""
_UNFOLD: Final = re.compile(
    r'\n|(?<=[\s:])(?=File "[^"]{1,300}", line \d+, in )'
    r"|(?<=\s)(?=(?:[a-z_]\w{0,40}\.){0,6}(?:StopIteration|[A-Z]\w{0,60}(?:Error|Exception|Interrupt))(?:: |\s*$))"
)
"""Where a call or an exception begins in the middle of a line."""
_ESCAPED_END: Final = re.compile(r'\\n(?![^"]{0,300}", line \d)')
"""An escaped newline, but not part of a call's path such as C:\\nets."""
_LIBRARY: Final = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen|\\lib\\|/torch/")
_ANY_EXCEPTION: Final = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w+)(?:: (?P<text>.*)|:?\s*)$"
)
"""The last line of a traceback, whatever its class is called."""
_CONTINUES: Final = re.compile(r"(?![\w.]+: )[a-z`(][^=]* ")
"""How a line begins that continues a message which a terminal or a paste has broken."""
_CONTINUES_BELOW: Final = re.compile(r"\d+ validation errors? for [\w.]+$")
"""An exception whose reason is in the two lines after it, as pydantic prints it."""
_MAX_FOLD_WIDTH: Final = 240
_MIN_FOLD_WIDTH: Final = 50
"""Terminals and forums fold lines at a width between these."""
_LONG_WORD_CHARS: Final = 15
_MAX_UNFOLDED_FULL: Final = 2
"""If more lines than this are within a long word of the width, the log has been folded."""
_BEGINS: Final = re.compile(
    rb"""
    \s*(?: Traceback\ \( | File\ " | \[\ ?(?:rank|default|[EWIF]\d*\b|[\d.]+[,\]]) | \(\w+\ pid= | \S+:\d+:\d+\ \[\d
          | \d{4}-\d\d-\d\d | [EWIF]\d+\  | (?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b | [=*-]{3} | Last\ error
          | (?:ERROR|WARNING|WARN|INFO|CRITICAL)\b | frame\ \# | srun: | slurmstepd | terminate\ called | During\ handling )
    """,
    re.VERBOSE,
)
"""How a line begins that does not continue the one before it."""
_IGNORED: Final = re.compile(r"^(?:Exception ignored in|Error in atexit|--- Logging error ---)")
_TRACEBACK_STARTS: Final = ("Traceback (most recent", "Original Traceback (most")
# The DataLoader of torch up to 1.1 raises a worker's exception with its traceback as the text.
_RAISED_AGAIN: Final = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception): Traceback \(most recent call last\):$"
)
_CAUGHT_IN_WORKER: Final = re.compile(r"^Caught \w+ in (?:DataLoader worker|replica|pin memory)")
_ROOT_CAUSE: Final = re.compile(r"^Root Cause \(first observed failure\)")
_RANK_OF_ROOT: Final = re.compile(r"^\s*rank\s*: (\d+) \(local_rank")
_SEQUENCE: Final = re.compile(r"SeqNum=(\d+)(?:, OpType=(\w+)(?:, NumelIn=(\d+))?)?")
_GROUP: Final = re.compile(r"\[PG (?:ID )?(\d+)")
_SAME_SIZES: Final = ("ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE")
"""Collectives in which every rank passes the same number of elements."""
_MAX_ALIKE: Final = 1_000
"""After so many lines with the same grams of rules, each of which had a cause, further ones are
skipped as having the same cause, so that no log takes a minute per GB."""


@dataclass(slots=True, kw_only=True)
class Cause:
    """One explanation of a log.

    Attributes:
        code: Its code in the catalogue.
        kind: The failure kind.
        level: How much its lines prove.
        retry: Whether trying again can help.
        cause: What happened.
        fix: What to do.
        page: Its documentation.
        rank: The rank of the first line that shows it and names one; ``None`` if no line does.
        evidence: The first lines that show it, as ``(line number from 1, text)``; number 0 means
            a report of ddpsafe.
        count: How many lines show it.
        last: The number of the last line that shows it.
        is_warning: Whether the programs that printed its lines marked all of them as warnings.
        has_local_rank: Whether `rank` is a local_rank, because the line names no other.
        is_wrapper: Whether it only re-raises another process's exception, which may follow.
        is_taken_back: Whether a later line showed that it was over.
    """

    code: str
    kind: FailureKind
    level: Level
    retry: Retry
    cause: str
    fix: str
    page: str
    rank: int | None = None
    evidence: list[tuple[int, str]] = field(default_factory=list)
    count: int = 0
    last: int = 0
    is_warning: bool = False
    has_local_rank: bool = False
    is_wrapper: bool = False
    is_taken_back: bool = False

    def as_json(self) -> dict[str, object]:
        """Return what ``ddpsafe explain --json`` prints of it."""
        return {
            "code": self.code,
            "cause": self.cause,
            "fix": self.fix,
            "rank": self.rank,
            "evidence": [{"line": number, "text": text} for number, text in self.evidence],
            "retry": self.retry,
            "kind": self.kind,
            "page": self.page,
        }


@dataclass(slots=True, kw_only=True)
class _Traceback:
    """A traceback of one rank that has not ended yet.

    Attributes:
        frame: The last call so far outside of libraries.
        innermost: The line of the last call so far, with slashes; ``None`` before the first.
        calls: The last calls so far, in the form of `innermost`.
        is_ignored: Whether Python reports the exception as ignored.
        is_original: Whether a worker or a replica raised it, and it is part of a wrapper's text.
        is_stack: Whether it is the stack of a log message, without an exception.
    """

    frame: str | None = None
    innermost: str | None = None
    calls: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_CALLS_OF_TRACEBACK))
    is_ignored: bool = False
    is_original: bool = False
    is_stack: bool = False


_USER: Final = "DS-USER-exception"
_FIX_OF_USER: Final = "Fix that line: print what goes into it, on this rank and on one that works, in one process and with num_workers=0 if it comes from data; ranks that complain of a lost peer failed because of it."
_FIX_OF_CUT_OFF: Final = "Look for the line after those calls (…Error: …), in the rank's own log (torchrun --log-dir D --tee 3 keeps one for each) or further up in that of another rank."
_SOURCE_OF_CALL: Final = 2
_CALLS_OF_CUT_OFF: Final = 2
_GENERAL_FIXES: Final = (_FIX_OF_USER, *(fix for _, _, fix in KINDS_OF_EXCEPTIONS[-2:]))
"""Fixes that say less than the fix for what the script was doing."""
_RULE_OF: Final = {rule.code: rule for rule in RULES}
_ORDER_OF: Final = {code: place for place, code in enumerate(_RULE_OF)}
_WORKER_RAISED: Final = _RULE_OF["DS-DATA-worker-raised"]
_REPLICA_RAISED: Final = "The forward failed in a copy of DataParallel"
_FIX_OF_REPLICA: Final = "Read the 'Original Traceback' that follows: it ends with the line of the model. Try it on one GPU; for several use DistributedDataParallel, with one process for each, as DataParallel copies the model in every step and splits only tensors."
_TIMED_OUT: Final = frozenset(code for code in _RULE_OF if code.startswith("DS-HANG-"))
_MISMATCH: Final = "DS-HANG-mismatch"
_WATCHDOG: Final = "DS-HANG-watchdog"
_UNUSED: Final = ("DS-DDP-unused", "DS-DDP-outputs-unused")
_UNUSED_ARE: Final = re.compile(
    r"Parameter(?P<of> indices|s) which did not receive grad for rank \d+: "
    r"(?P<first>[\w.]+(?:,? [\w.]+){0,3})(?P<more>,? [\w.]+)?"
)
_EXCEPTION_LEVELS: Final = ("exception", "end")
_REPORT: Final = "DS-RUN-report"
_RETRY_OF: Final[dict[str, Retry]] = {
    "config": "never",
    "user-error": "never",
    "unpicklable": "never",
    "out-of-memory": "never",
    "preempted": "yes",
    "hardware": "elsewhere",
}
"""Whether trying again can help, by the failure kind in a report; "once" for all others."""


class LogReader:
    """Reads lines and keeps the causes that the catalogue finds in them."""

    def __init__(self) -> None:
        self._found: dict[str, Cause] = {}
        self._waiting: dict[str, Cause] = {}  # of rules that need another line, too
        self._also: set[str] = set()  # codes of rules whose other line has been read
        # A shape is a line without its digits.
        self._shapes: dict[bytes, int] = {}
        self._cause_of_shape: dict[bytes, Cause] = {}
        # Codes of the causes that the current line takes back, and that all lines of a shape do.
        self._ended: list[str] = []
        self._ended_by_shape: dict[bytes, tuple[str, ...]] = {}
        self._alike: dict[frozenset[str], int] = {}
        # By rank, since the ranks' tracebacks may be mixed in the log.
        self._tracebacks: dict[int | None, _Traceback] = {}
        self._lone: Cause | None = None  # the script's own exception, without a traceback
        self._quoted: Cause | None = None
        # By rank: the last `assert` line, which a traceback prints as the source of a call.
        self._asserted: dict[int | None, str] = {}
        self._knows_original = False
        self._report: Mapping[str, Any] | None = None
        self._root_rank: int | None = None
        self._is_root_cause = False
        # Whether further calls of tracebacks are skipped: see _MAX_CALLS.
        self._skips_calls = False
        self._calls = 0
        self._in_traceback = False
        self._since_frame = 0
        self._following: list[bytes] = []
        # The rest of the current line, if a terminal or a paste has folded it.
        self._folded: list[str] = []
        self._skipped = 0
        self._sieve: _Sieve | None = None
        self._lowest: tuple[int, int | None] | None = None
        self._unused = ""
        # By group: the lowest and the highest (sequence number, rank) of its timed-out collectives.
        self._reached: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
        # By group and sequence number of a timed-out collective: the first call, rank and line.
        self._timed_out: dict[tuple[str, str], tuple[str, int | None, tuple[int, str]]] = {}
        self._progress = 0  # number of the last line, near the end, that shows progress
        self.lines = 0

    def read(self, stream: BinaryIO) -> None:
        """Read a log to its end; overlong lines are cut."""
        rest = tail = b""
        while chunk := stream.read(_CHUNK_BYTES):
            tail = (tail + chunk)[-_TAIL_BYTES:]
            chunk = rest + chunk
            end = chunk.rfind(b"\n") + 1
            if not end and len(chunk) < 2 * _CHUNK_BYTES:
                rest = chunk
                continue
            end = end or len(chunk)
            self._read_chunk(chunk[:end])
            rest = chunk[end:]
        self._read_chunk(rest)
        self._note_progress(tail)

    def read_text(self, text: str) -> None:
        """Read a log that is already a string."""
        log = text.encode("utf-8", "replace")
        self._read_chunk(log)
        self._note_progress(log[-_TAIL_BYTES:])

    def _note_progress(self, tail: bytes) -> None:
        """Record the last line that shows progress, if the end of the log has one."""
        for before, line in enumerate(reversed(tail.splitlines())):
            if _PROGRESS.search(line.decode("utf-8", "replace")):
                self._progress = self.lines - before
                return

    def _read_chunk(self, chunk: bytes) -> None:
        first = self.lines + 1
        self.lines += chunk.count(b"\n") + (not chunk.endswith(b"\n") and chunk != b"")
        lines = chunk.split(b"\n")
        if len(chunk) < _SMALL_BYTES or _ALWAYS:
            width = max(map(len, lines))
            full = sum(len(each) > width - _LONG_WORD_CHARS for each in lines)
            for at, raw in enumerate(lines):
                if self._skipped:
                    self._skipped -= 1
                    continue
                self._following = lines[at + 1 : at + 4]
                if width <= _MAX_FOLD_WIDTH:
                    self._folded = _folded_rest(
                        lines[at : at + 4], width, is_paste=full > _MAX_UNFOLDED_FULL
                    )
                self._read_raw(first + at, raw, None)
            self._following, self._folded = [], []
            return
        self._sieve = self._sieve or _Sieve()
        found = self._sieve.find(chunk)
        number = 0
        for at in sorted(found):
            # Read every line of a traceback: its exception may match no rule.
            while self._in_traceback and not self._skips_calls and number < at:
                self._read_raw(first + number, lines[number], ())
                number += 1
            self._read_raw(first + at, lines[at], found[at])
            number = at + 1
        while self._in_traceback and not self._skips_calls and number < len(lines):
            self._read_raw(first + number, lines[number], ())
            number += 1

    def _read_raw(self, number: int, raw: bytes, grams: Collection[str] | None) -> None:
        """Read one line; `grams` are those of its grams that rules need, if they are known."""
        is_frame = b'File "' in raw
        if is_frame:
            if self._skips_calls:
                return
            self._calls += 1
            self._skips_calls = self._calls >= _MAX_CALLS
        if grams and self._alike and self._alike.get(frozenset(grams), 0) >= _MAX_ALIKE:
            return
        # Deleting the digits runs in C, and most lines of a log end here.
        shape = raw[:_MAX_LINE_BYTES].translate(None, b"0123456789")
        seen = self._shapes.get(shape, 0)
        if seen >= _MAX_SAME_LINES and not is_frame:
            for code in self._ended_by_shape.get(shape, ()):
                self._take_back(code)
            cause = self._cause_of_shape.get(shape)
            if cause is None:
                return
            if not cause.is_taken_back:
                cause.count += 1
                cause.last = number
                if cause.code in _TIMED_OUT:  # lines that differ in the numbers that matter
                    line = raw[:_MAX_LINE_BYTES].decode("utf-8", "replace")
                    self._compare_sequence(number, line, _rank_of(line))
                return
            # The cause was taken back and shows again: match its line again.
        if len(self._shapes) < _MAX_SHAPES:
            self._shapes[shape] = seen + 1
        if self._in_traceback:
            self._since_frame += 1
            self._in_traceback = self._since_frame < _MAX_LINES_AFTER_CALL
        # A carriage return redraws a progress bar: what follows it is a new line.
        for part in raw.split(b"\r"):
            text = part[:_MAX_LINE_BYTES].decode("utf-8", "replace")
            self._read_line(number, text, shape, grams)
            if len(part) > _MAX_LINE_BYTES and "Traceback (most" in text:
                # A traceback in JSON, with its exception at the end of the line.
                end = part[_MAX_LINE_BYTES:][-_MAX_LINE_BYTES:].decode("utf-8", "replace")
                prefix = _PREFIX.match(text)
                self._read_line(number, f"{prefix[0] if prefix else ''}{end}", shape, grams)
        if self._ended:
            if len(self._ended_by_shape) < _MAX_SHAPES:
                self._ended_by_shape[shape] = tuple(self._ended)
            self._ended.clear()

    def _read_line(
        self, number: int, line: str, shape: bytes, grams: Collection[str] | None
    ) -> None:
        line = (line if line.isprintable() else _ANSI.sub("", line)).rstrip()
        if (record := _RECORD.match(line)) is not None:
            for part in json.loads(f'"{record["text"]}"', strict=False).splitlines():
                self._read_line(number, part, shape, None)
            return
        body = _PREFIX.sub("", line)
        prefix = line.removesuffix(body)
        usual = _in_usual_form(body)
        if usual != body:
            body, grams = usual, None
        if "root causes" in body or " due to " in body:
            body = _HEDGE.sub("", body)
        if ('File "' in body or 'File \\"' in body) and not _FRAME.fullmatch(body):
            # A traceback in one line: a paste lost its newlines, or it is JSON.
            text = _ESCAPED_END.sub("\n", body).replace('\\"', '"')
            for part in filter(str.strip, _UNFOLD.split(text)):
                self._read_body(number, prefix + part, _PREFIX.sub("", part), shape, grams)
        else:
            self._read_body(number, line, body, shape, grams)

    def _read_body(
        self, number: int, line: str, body: str, shape: bytes, grams: Collection[str] | None
    ) -> None:
        """Read the body of a line, or of a part of one."""
        frame = _FRAME.match(body)
        rank = _rank_of(line)
        if frame is not None:
            self._in_traceback, self._since_frame = True, 0
            traceback = self._tracebacks.setdefault(rank, _Traceback())
            file, line_number, function = (each for each in frame.groups() if each is not None)
            traceback.innermost = frame[0].replace("\\", "/")
            traceback.calls.append(traceback.innermost)
            if not _LIBRARY.search(file):
                at = f"{file}:{line_number}" if line_number else file
                traceback.frame = f"{at} in {function}"
            rest = body[frame.end() :].strip()
            if rest and not rest.startswith("("):  # the newline after the call was lost
                self._match(number, line, rest, rank, None)
        elif body.lstrip(" ╭─").startswith(_TRACEBACK_STARTS) or (
            self._following and _RAISED_AGAIN.match(body)
        ):
            before = self._tracebacks.get(rank)
            is_ignored = before is not None and before.is_ignored and before.innermost is None
            self._tracebacks[rank] = _Traceback(
                is_ignored=is_ignored,
                is_original="Original Traceback" in body or ": Traceback" in body,
            )
            self._in_traceback, self._since_frame = True, 0
        elif body.startswith("Stack (most recent"):
            self._tracebacks[rank] = _Traceback(is_stack=True)
        else:
            if _IGNORED.match(body):
                self._tracebacks[rank] = _Traceback(is_ignored=True)
                self._in_traceback, self._since_frame = True, 0
            cause = self._match(number, line, body, rank, grams)
            if cause is not None and len(self._cause_of_shape) < _MAX_SHAPES:
                self._cause_of_shape[shape] = cause
            if grams:
                key = frozenset(grams)
                self._alike[key] = self._alike.get(key, 0) + 1 if cause is not None else -_MAX_ALIKE

    def _match(
        self, number: int, line: str, body: str, rank: int | None, grams: Collection[str] | None
    ) -> Cause | None:
        traceback = self._tracebacks.get(rank) if self._in_traceback else None
        innermost = None if traceback is None else traceback.innermost
        raised = _EXCEPTION.match(body)
        is_logged = "ERROR" in line
        if body.lstrip().startswith("assert"):
            self._asserted[rank] = body.strip()
        if raised is None and any(word in body for word in _EXCEPTION_WORDS):
            bare = _undecorated(body)
            if bare is not None:
                body, is_logged = bare, True
                raised = _EXCEPTION.match(body)
        if raised is None and innermost is not None:
            raised = _ANY_EXCEPTION.match(body)
        if raised is None:
            innermost = None
        elif _CONTINUES_BELOW.search(body):
            below = [each.decode("utf-8", "replace").strip() for each in self._following[:2]]
            body = " ".join([body, *below])
            raised = _EXCEPTION.match(body) or raised
        best = self._find_best(number, line, body, innermost, grams)
        if self._folded:
            best = self._find_folded(number, line, body, innermost, best)
        # Keep the rank that torchrun's summary names as the first to fail.
        if _ROOT_CAUSE.match(body):
            self._is_root_cause = True
        elif self._is_root_cause and (root := _RANK_OF_ROOT.match(body)):
            self._root_rank, self._is_root_cause = int(root[1]), False
        if raised is not None and traceback is not None:
            del self._tracebacks[rank]
            self._in_traceback = bool(self._tracebacks)
            if traceback.is_ignored:
                return None
        if raised is not None and self._following and (best is None or best[0].is_fallback):
            # A paste may break a message anywhere: join it with the lines that continue it.
            following = (each.decode("utf-8", "replace").rstrip() for each in self._following)
            texts = (_PREFIX.sub("", text) for text in following)
            rest = list(itertools.takewhile(_CONTINUES.match, texts))
            best = self._find_broken(number, line, (body, *rest), innermost, own=best) or best
        is_wrapper = (
            raised is not None and _CAUGHT_IN_WORKER.match(raised["text"] or "") is not None
        )
        # Where it was raised says more than words that any exception may have.
        is_by_words = (
            best is not None
            and best[0].is_fallback
            and (best[0].raised_in is not None or best[0].level == "exception")
        )
        if (best is None or is_by_words) and raised is not None and not is_wrapper:
            found = (rule for rule in _RULES_BY_PLACE if _is_raised_in(rule, innermost))
            best = next(((rule, raised) for rule in found), best)
        if best is not None:
            rule, match = best
            if _PASSED_TEST.search(body):
                return None
            if rule.code in _TIMED_OUT:
                self._compare_sequence(number, body, rank)
            self._name_unused(body)
            cause = self._note(self._found, rule, match, number, line, body)
            if raised is not None and traceback is not None and traceback.is_original:
                self._knows_original = True
            if rule.level == "exception" and traceback is not None and cause.count == 1:
                cause.cause += f" Raised at {traceback.frame}." if traceback.frame else ""
            return cause
        if raised is not None:
            raised = _EXCEPTION.match(" ".join((body, *self._folded))) or raised
            return self._note_exception(
                raised, traceback, number, line, body, is_logged=is_logged, is_wrapper=is_wrapper
            )
        self._note_quoted(number, body, rank)
        return None

    def add(self, finding: RecordedFailure) -> None:
        """Add what flight recordings show."""
        self._note_proved(f"DS-{finding.code}", finding.facts, finding.evidence, finding.rank)

    def _note_proved(
        self,
        code: str,
        facts: dict[str, str],
        evidence: list[tuple[int, str]],
        rank: int | None = None,
    ) -> None:
        """Record a cause that several records or lines show together."""
        if code not in self._found:  # else an earlier group stopped, and this one waits for it
            cause = self._found[code] = _cause_of(_RULE_OF[code], facts)
            cause.rank, cause.evidence, cause.count = rank, evidence, len(evidence)

    def add_report(self, report: Mapping[str, Any]) -> None:
        """Add the report of a launch of ddpsafe; of several, the newest attempt counts."""
        if self._report is not None and self._report["attempt"] > report["attempt"]:
            return
        self._report = report
        facts = {name: str(report[name]).removesuffix(".") for name in ("what", "cause", "fix")}
        found = _cause_of(_RULE_OF[_REPORT], facts)
        found.kind = report["kind"]
        found.retry = _RETRY_OF.get(found.kind, "once")
        ranks = report.get("missing_ranks") or [None]
        found.rank = report.get("rank", ranks[0])
        found.evidence = [(0, line) for line in report["details"]]
        found.evidence, found.count = found.evidence[:_MAX_EVIDENCE], 1
        self._found[_REPORT] = found

    def _find_best(
        self,
        number: int,
        line: str,
        body: str,
        innermost: str | None,
        grams: Collection[str] | None,
    ) -> tuple[LogRule, re.Match[str]] | None:
        """Return the best rule that a line matches; rules that need another line are recorded.

        Args:
            number: The number of the line.
            line: The line as in the log.
            body: The line without what a launcher or a logger puts before it.
            innermost: The call that raised the exception, if the line is one.
            grams: See `_candidates`.
        """
        best: tuple[LogRule, re.Match[str]] | None = None
        for rule in _candidates(body, grams):
            if rule.also is not None and rule.also.search(body):
                self._also.add(rule.code)
            if rule.until is not None and rule.until.search(body):
                self._take_back(rule.code)
                self._ended.append(rule.code)
            # A rule that needs another line may still replace an earlier rule, by its `over`.
            is_settled = best is not None and _strength(best[0]) == (False, 0)
            if is_settled and rule.also is None:
                continue
            match = next((found for sign in rule.signs if (found := sign.search(body))), None)
            if match is None or (rule.check is not None and not rule.check(match)):
                continue
            if not rule.is_fallback and _is_raised_in(rule, innermost) and not is_settled:
                return rule, match
            if rule.raised_in is not None and rule.also is None and not rule.is_fallback:
                continue
            if rule.also is not None and (is_settled or rule.code not in self._also):
                # It counts only if the other line follows, so keep looking.
                self._note(self._waiting, rule, match, number, line, body)
            elif best is None or _strength(rule) < _strength(best[0]):
                best = (rule, match)
        return best

    def _find_broken(
        self,
        number: int,
        line: str,
        parts: tuple[str, ...],
        innermost: str | None,
        *,
        own: tuple[LogRule, re.Match[str]] | None,
    ) -> tuple[LogRule, re.Match[str]] | None:
        """Return the rule that a message matches which is broken between words or within one.

        `own` is the match of the first line alone. If there is one, matches within the other lines
        are left to those.
        """
        is_message = bool(self._folded) and own is None
        found = []
        for joint in (" ", "") if len(parts) > 1 else ():
            text = joint.join(parts)
            text = _HEDGE.sub("", text) if self._folded else text
            best = self._find_best(number, line, text, innermost, None)
            # The match must reach past the first line, and begin in it unless this is a folded message.
            end = len(parts[0])
            if best is not None and best[1].end() > end and (is_message or best[1].start() < end):
                found.append(best)
        return min(found, key=lambda each: _strength(each[0]), default=None)

    def _find_folded(
        self,
        number: int,
        line: str,
        body: str,
        innermost: str | None,
        best: tuple[LogRule, re.Match[str]] | None,
    ) -> tuple[LogRule, re.Match[str]] | None:
        """Return the rule for a line joined with its rest, which is then skipped; else `best`."""
        whole = self._find_broken(number, line, (body, *self._folded), innermost, own=best)
        if whole is None or (best is not None and _place(best[0]) <= _place(whole[0])):
            return best
        self._skipped = len(self._folded)
        return whole

    def _take_back(self, code: str) -> None:
        """Drop a cause; if its lines appear again, they are matched again."""
        cause = self._found.pop(code, None)
        if cause is not None:
            cause.is_taken_back = True
            self._alike.clear()

    def _note(
        self,
        where: dict[str, Cause],
        rule: LogRule,
        match: re.Match[str],
        number: int,
        line: str,
        body: str,
    ) -> Cause:
        facts = {name: value or "" for name, value in match.groupdict().items()}
        if rule.raised_in is not None:
            text = body.strip().rstrip(":")
            if text == "AssertionError" and _rank_of(line) in self._asserted:
                text += f": {self._asserted.pop(_rank_of(line))}"  # its condition
            facts["said"] = text[:300].removesuffix(".")
        cause = where.get(rule.code)
        level = rule.level
        warning = _WARNING.search(line)
        if level in ("cause", "likely") and warning is not None:
            level = "noise" if warning["info"] and not _RAISED.search(body) else "likely"
        is_warning = warning is not None or level == "noise"
        if cause is None:
            cause = where[rule.code] = _cause_of(rule, facts)
            cause.level, cause.is_warning = level, is_warning
        cause.is_warning, cause.last = cause.is_warning and is_warning, number
        if LEVELS[level] < LEVELS[cause.level]:  # now it is an error, and no longer a warning
            cause.level, cause.evidence = level, []
        if cause.rank is None:
            cause.rank = int(facts["rank"]) if facts.get("rank") else _rank_of(line)
            named = _search_rank(line)
            is_local = named is not None and named.lastgroup == "local"
            cause.has_local_rank = cause.rank is not None and is_local
        cause.count += 1
        if len(cause.evidence) < _MAX_EVIDENCE:
            cause.evidence.append((number, body[:_MAX_EVIDENCE_CHARS]))
        return cause

    def _note_exception(
        self,
        raised: re.Match[str],
        traceback: _Traceback | None,
        number: int,
        line: str,
        body: str,
        *,
        is_logged: bool,
        is_wrapper: bool,
    ) -> Cause | None:
        """Record the script's own exception; one without a traceback counts if there is no other.

        One that a program logs or quotes counts only if the run makes no progress after it.
        """
        known = self._found.get(_USER)
        if traceback is None and (known is None or known.is_wrapper):
            known = self._lone
        if known is not None and not known.is_wrapper:
            known.count += 1
            known.last, known.is_warning = number, known.is_warning and is_logged
            return known
        at = ""
        frame = None if traceback is None else traceback.frame
        if frame is not None:
            at = f" at {frame}"
        own_text = raised["text"] or ""
        if not own_text and raised["type"] == "AssertionError":
            own_text = self._asserted.pop(_rank_of(line), "")
        text = f": {own_text[:300].removesuffix('.')}" if own_text else ""
        is_replica = is_wrapper and "replica" in own_text
        calls = () if traceback is None else tuple(traceback.calls)
        who, meaning, fix = _read_exception(f"{raised['type']}{text}", calls)
        what = f"{who} {raised['type']}"
        if is_wrapper:  # the original traceback follows, with the line of the dataset
            what = _REPLICA_RAISED if is_replica else _WORKER_RAISED.cause.removesuffix(".")
            meaning, fix = "", _FIX_OF_REPLICA if is_replica else _WORKER_RAISED.fix
        cause = _user_error(f"{what}{text}{at}.{meaning}", fix, _rank_of(line), number, body)
        cause.level = "end" if traceback is None else "exception"
        cause.is_warning, cause.is_wrapper = is_logged and traceback is None, is_wrapper
        if traceback is None:
            self._lone = cause
        else:
            self._found[_USER] = cause
            self._skips_calls = self._skips_calls or not cause.is_wrapper
        return cause

    def _note_quoted(self, number: int, body: str, rank: int | None) -> None:
        """Record what a sentence or a logger calls an error, in case the log has nothing else."""
        if self._quoted is not None:
            return
        if (match := _QUOTED.search(body)) is not None:
            quoted = match[0].removesuffix(".")
            who, meaning, fix = _read_exception(quoted, (body,))
        elif (match := _LOGGED.search(body)) is not None:
            quoted, who = match["text"].removesuffix("."), "A program reported an error:"
            _, meaning, fix = _read_exception(quoted, ())
        elif number <= _MAX_QUOTED_LINE and (match := _ASSERTION.match(body)) is not None:
            quoted, who = f"AssertionError: {match[1]}", "The script raised"
            _, meaning, fix = _read_exception(quoted, ())
        else:
            return
        self._quoted = _user_error(f"{who} {quoted}.{meaning}", fix, rank, number, body)
        self._quoted.is_warning = True

    def _compare_sequence(self, number: int, body: str, rank: int | None) -> None:
        """Record the rank that is behind, and two ranks that call one collective differently."""
        match = _SEQUENCE.search(body)
        if match is None:
            return
        if self._lowest is None or int(match[1]) < self._lowest[0]:
            self._lowest = (int(match[1]), rank)
        group = _GROUP.search(body)
        name = group[1] if group else ""
        if rank is not None and (name in self._reached or len(self._reached) < _MAX_SHAPES):
            here = (int(match[1]), rank)
            low, high = self._reached.get(name, (here, here))
            self._reached[name] = (min(low, here), max(high, here))
        if match[2] is None or _MISMATCH in self._found or len(self._timed_out) >= _MAX_SHAPES:
            return
        has_size = match[3] is not None and match[2] in _SAME_SIZES
        call = f"{match[2]} of {match[3]} elements" if has_size else match[2]
        key = (name, match[1])
        call2, rank2, line2 = self._timed_out.setdefault(
            key, (call, rank, (number, body[:_MAX_EVIDENCE_CHARS]))
        )
        if call2 == call or rank2 == rank or None in (rank, rank2):
            return
        facts = {"number": match[1], "rank": str(rank), "call": call}
        facts |= {"rank2": str(rank2), "call2": call2}
        self._note_proved(_MISMATCH, facts, [line2, (number, body[:_MAX_EVIDENCE_CHARS])])

    def causes(self) -> list[Cause]:
        """Return the causes, most likely first; noise only if there is nothing else."""
        shown = [*self._found.values(), *([self._lone] if self._lone else [])]
        shown += [cause for code, cause in self._waiting.items() if code in self._also]
        shown += [self._quoted] if self._quoted else []
        found: dict[str, Cause] = {}
        for cause in shown:
            is_outlived = cause.is_warning and cause.last < self._progress
            if not is_outlived and not (cause.is_wrapper and self._knows_original):
                found.setdefault(cause.code, cause)
        if self._lowest is not None and self._lowest[1] is not None:
            for code in _TIMED_OUT & found.keys() - {_MISMATCH}:
                found[code].rank = self._lowest[1]
        if _WATCHDOG in found:
            found[_WATCHDOG].cause += self._skew()
        for code in found.keys() & set(_UNUSED):
            found[code].cause += self._unused
        ranked = sorted(found.values(), key=_order)
        general = {code for rule in RULES if rule.code in found for code in rule.over}
        kept = [cause for cause in ranked if cause.code not in general]
        real = [cause for cause in kept if cause.level != "noise"] or kept or self._cut_off()
        is_known = (
            self._root_rank is not None
            and real
            and real[0].level in ("cause", *_EXCEPTION_LEVELS, "exit")
        )
        if is_known and (real[0].rank is None or real[0].has_local_rank):
            real[0].rank = self._root_rank
        return real

    def _name_unused(self, body: str) -> None:
        """Record which parameters got no gradient, from DDP's first message about them."""
        match = None if self._unused else _UNUSED_ARE.search(body)
        if match is not None:
            are = "They are" if match["of"] == "s" else "Their numbers are"
            self._unused = f" {are} {match['first']}{' and more' if match['more'] else ''}."

    def _skew(self) -> str:
        """Describe ranks of one group that waited in different collectives, if there are any.

        A difference of one is not enough: it also appears after a lost connection.
        """
        for (low, rank), (high, rank2) in self._reached.values():
            if high - low > 1:
                return (
                    f" Rank {rank} waited in number {low}, and rank {rank2} in {high}: they have called"
                    " different numbers of collectives (uneven batches, or a branch on one rank)."
                )
        return ""

    def _cut_off(self) -> list[Cause]:
        """Return the cause of a log that ends in a traceback, with its calls but no exception."""
        if not self._in_traceback or self._since_frame > _SOURCE_OF_CALL:
            return []
        for rank, traceback in self._tracebacks.items():
            calls = tuple(traceback.calls)
            if len(calls) < _CALLS_OF_CUT_OFF or traceback.is_ignored or traceback.is_stack:
                continue
            who, _, fix = _read_exception("", calls)
            at = f" at {traceback.frame}" if traceback.frame else ""
            what = (
                f"{who} an exception that this log does not show, as it ends in the traceback{at}."
            )
            fix = _FIX_OF_CUT_OFF if fix == _FIX_OF_USER else f"{_FIX_OF_CUT_OFF} {fix}"
            cause = _user_error(what, fix, rank, self.lines, calls[-1])
            cause.level = "exception"
            return [cause]
        return []


_OPENING: Final = re.compile(r"\(\?(?:[a-zA-Z]*:|P<\w+>)|\((?!\?)")


def _literals_of(pattern: str) -> list[str]:
    """Return lowercase texts, one of which every line has that the pattern matches.

    ``[""]`` if they are unknown. They come from the part of the pattern (or group) whose shortest
    text is longest.
    """
    found = []
    for alternative in _split(pattern):
        best, run = [""], ""
        parts = _parts_of(alternative)
        for part, after in zip(parts, [*parts[1:], ""], strict=True):
            is_optional = after[:1] in ("?", "*", "{")
            literal = part[1:] if len(part) == 2 and not part[1].isalnum() else part  # noqa: PLR2004 - an escape
            if (
                len(literal) == 1
                and (literal != part or part not in ".^$|?*+()")
                and not is_optional
            ):
                run += literal.lower()
                continue
            best, run = max(best, [run], key=_shortest), ""
            opening = _OPENING.match(part)
            if opening is not None and not is_optional:
                best = max(best, _literals_of(part[opening.end() : -1]), key=_shortest)
        found += max(best, [run], key=_shortest)
    return found


def _shortest(texts: Iterable[str]) -> int:
    return min(map(len, texts))


def _parts_of(pattern: str) -> list[str]:
    """Split a pattern into characters, classes, repetitions and whole groups."""
    parts, group, depth = [], "", 0
    for part in re.findall(
        r"\\.|\[(?:\\.|[^\]])+\]|\{[\d,]+\}|.", re.sub(r"^\(\?i\)", "", pattern)
    ):
        depth += (part == "(") - (part == ")")
        group += part
        if depth == 0:
            parts.append(group)
            group = ""
    return parts


def _split(pattern: str) -> list[str]:
    """Split a pattern where it branches outside of any group."""
    found = [""]
    for part in _parts_of(pattern):
        if part == "|":
            found.append("")
        else:
            found[-1] += part
    return found


_GRAM: Final = 4  # characters; a gram fits into 32 bits, so numpy can look up all of a log's
_FREQUENT: Final = (
    " step epoch iteration train loss valid lr: rate time data rank world size batch error load worker"
    " saved checkpoint to validation optimizer backward forward warning received channel via module"
    " traceback (most recent call last) /lib/python3 _wrapped_call autograd forward(*args, **kwargs)"
    " data time checkpoint, validation accuracy, in main, self"
)
"""What most lines of healthy logs and of tracebacks contain."""
_ZSH_SIGNS: Final = (
    "zsh: ",
    "zsh:1: ",
    "  killed  ",
    "  segmentation fault  ",
    "  abort  ",
    "(os error ",
    "cudaerror",
    "hiperror",
    "cuda_error_",
    "cuda error",
    "cuda failure",
    "os { code: ",
)
_TRACEBACK_SIGNS: Final = ('file "', "traceback (most", "ror: ", "xception", "root cause")
"""Parts of lines that no rule is about, but that lead to the exception of a traceback."""


def _index_rules() -> tuple[frozenset[int], dict[str, list[tuple[str, int]]]]:
    """Return the rules that any line may match, and the others by a gram that their lines have.

    Of each literal text of a rule, its key is the gram that the fewest rules have. Looking up all
    grams of a line takes a tenth of the time of searching it for each of 300 texts.
    """
    literals: dict[int, list[str]] = {}
    for number, rule in enumerate(RULES):
        if not rule.signs:  # it is not found in the lines of a log
            continue
        others = [each for each in (rule.also, rule.until) if each is not None]
        patterns = [*rule.signs, *others]
        literals[number] = [text for each in patterns for text in _literals_of(each.pattern)]
    always = {number for number, texts in literals.items() if _shortest(texts) < _GRAM}
    counts = Counter(gram for texts in literals.values() for text in texts for gram in _grams(text))
    keyed: dict[str, list[tuple[str, int]]] = {}
    for number in literals.keys() - always:
        for text in dict.fromkeys(literals[number]):
            key = min(
                sorted(_grams(text)),
                key=lambda gram: (gram in _FREQUENT, counts[gram], " " in gram),
            )
            keyed.setdefault(key, []).append((text, number))
    return frozenset(always), keyed


def _grams(text: str) -> set[str]:
    return {text[start : start + _GRAM] for start in range(len(text) - _GRAM + 1)}


_ALWAYS, _BY_GRAM = _index_rules()


def _candidates(body: str, grams: Iterable[str] | None = None) -> Iterator[LogRule]:
    """Yield the rules that may match a line, in their order.

    Args:
        body: The line.
        grams: Those of its grams that are keys of rules; looked up if not given.
    """
    numbers = set(_ALWAYS)
    lowered = body.lower()
    for gram in _grams(lowered) & _BY_GRAM.keys() if grams is None else grams:
        for text, number in _BY_GRAM.get(gram, ()):
            if number not in numbers and text in lowered:
                numbers.add(number)
    for number in sorted(numbers):
        yield RULES[number]


class _Sieve:
    """Finds the lines of a large chunk that rules may match, with a few passes of numpy.

    Every four consecutive bytes are looked up in a table of the rules' grams. Most lines of any log
    have none of them, so no Python code runs for those. Most of the others have none of the texts
    that the grams come from.
    """

    _FACTOR: Final = 2_654_435_761
    _BITS: Final = 18

    def __init__(self) -> None:
        """Make the table."""
        import numpy as np

        self._np = np
        others = [sign.encode().lower() for sign in (*_TRACEBACK_SIGNS, *_ENGLISH, *_ZSH_SIGNS)]
        grams = {*_BY_GRAM, *(sign[:_GRAM].decode("latin-1") for sign in others)}
        self._gram_of = {int.from_bytes(gram.encode("latin-1"), "little"): gram for gram in grams}
        self._texts: dict[str, list[bytes]] = {gram: [] for gram in grams}
        for gram, each in _BY_GRAM.items():
            self._texts[gram] += [text.encode().translate(None, _CONTROL_BYTES) for text, _ in each]
        for sign in others:
            self._texts[sign[:_GRAM].decode("latin-1")].append(sign)
        self._table = np.zeros(1 << self._BITS, dtype=bool)
        self._table[self._hash(np.array(list(self._gram_of), dtype="<u4"))] = True

    def _hash(self, codes: Any) -> Any:
        return (codes * self._np.uint32(self._FACTOR)) >> self._np.uint32(32 - self._BITS)

    def find(self, chunk: bytes) -> dict[int, set[str]]:
        """Return the lines to read, by their number from 0, with the grams found in them."""
        np = self._np
        clean = _ANSI_BYTES.sub(b"", chunk) if b"\x1b" in chunk else chunk
        clean = clean.translate(None, _CONTROL_BYTES).lower()
        ends = np.flatnonzero(np.frombuffer(clean, dtype=np.uint8) == ord("\n"))
        bounds = [0, *ends.tolist(), len(clean)]
        found: dict[int, set[str]] = {}
        for offset in range(_GRAM):
            count = (len(clean) - offset) // _GRAM
            if count <= 0:
                continue
            codes = np.frombuffer(clean, dtype="<u4", offset=offset, count=count)
            hits = np.flatnonzero(self._table[self._hash(codes)])
            lines = np.searchsorted(ends, hits * _GRAM + offset)
            for line, code in zip(lines.tolist(), codes[hits].tolist(), strict=True):
                if (gram := self._gram_of.get(code)) is None:
                    continue
                start, end = bounds[line], bounds[line + 1]
                if any(clean.find(text, start, end) >= 0 for text in self._texts[gram]):
                    found.setdefault(line, set()).add(gram)
        return found


def _folded_rest(lines: list[bytes], width: int, *, is_paste: bool) -> list[str]:
    """Return the lines that continue the first one, which is folded if the next word did not fit.

    Args:
        lines: The current line and those that follow it.
        width: The width of the longest line of the log.
        is_paste: Whether several lines are about that long, as in a folded log.
    """
    rest: list[str] = []
    is_message = lines[0].rstrip().endswith(b":")
    for line, following in itertools.pairwise(lines):
        text = following.decode("utf-8", "replace").strip()
        word = following.lstrip().split(b" ", 1)[0]
        is_full = len(line) >= _MIN_FOLD_WIDTH or is_message
        # A single capitalised word need not continue the line.
        is_sentence = is_paste or is_message or (b"Error: " in lines[0] and " " in text)
        continues = is_sentence or not text[:1].isupper()
        if not (text and is_full and continues and len(line) + 1 + len(word) > width):
            break
        if _BEGINS.match(following):
            break
        rest.append(_PREFIX.sub("", text))
    return rest


_RULES_BY_PLACE: Final = tuple(
    rule for rule in RULES if rule.raised_in and (rule.is_fallback or not rule.signs)
)
"""Rules for any exception raised in a certain place, if no rule matches its text."""


def _undecorated(body: str) -> str | None:
    """Return the exception in a line without its decorations, removed one by one in linear time."""
    begin = 0
    for _ in range(_MAX_DECORATIONS):
        decoration = _DECORATION.match(body, begin)
        if decoration is None:
            return None
        begin = decoration.end()
        if _DECORATED.match(body, begin):
            quote = body[:begin].rstrip()[-1:]
            bare = body[begin:].rstrip("`*│ ")
            return bare.removesuffix(quote) if quote in ("'", '"') else bare
    return None


def _user_error(cause: str, fix: str, rank: int | None, number: int, body: str) -> Cause:
    """Make the cause of a line that no rule matches, at the level "noise"."""
    return Cause(
        code=_USER,
        kind="user-error",
        level="noise",
        retry="never",
        cause=cause,
        fix=fix,
        page="docs/reference/failures.md#ds-user-exception",
        rank=rank,
        evidence=[(number, body[:_MAX_EVIDENCE_CHARS])],
        count=1,
        last=number,
    )


def _read_exception(exception: str, calls: tuple[str, ...]) -> tuple[str, str, str]:
    """Return what raised an exception that no rule matches, what its text means, and what to do.

    Args:
        exception: Its type and text.
        calls: The calls of its traceback, the innermost last.
    """
    stages = (
        (what, fix)
        for call in reversed(calls)
        for pattern, what, fix in STAGES_OF_EXCEPTIONS
        if pattern.search(call)
    )
    who, fix_of_stage = next(stages, ("The script raised", None))
    kinds = ((cause, fix) for each, cause, fix in KINDS_OF_EXCEPTIONS if each.search(exception))
    cause, fix = next(kinds, ("", _FIX_OF_USER))
    if not cause and fix_of_stage is not None and fix in _GENERAL_FIXES:
        fix = fix_of_stage
    return who, f" {cause}".rstrip(), fix


def _in_usual_form(body: str) -> str:
    """Return messages of other shells, languages and Rust as bash and Python print them in English."""
    for text, english in (_ASCII_ENGLISH if body.isascii() else _ENGLISH).items():
        if text in body:
            body = (
                body.replace(text, english)
                .replace("\N{FULLWIDTH COLON}", ": ")
                .replace(" : ", ": ")
            )
    if (body.startswith(("zsh:", "[")) or body[:1].isdigit()) and (zsh := _ZSH.match(body)):
        what = zsh["what"] or zsh["signal"]
        english = _BASH_MESSAGES.get(what, what)
        if zsh["what"]:
            return f"zsh: {zsh['name']}: {english}"
        return english.capitalize() + zsh["core"]
    if "(world_size " in body:
        # ddpsafe's errors have it beside the rank. With what follows it, rules about a wrong world size
        # would match: "rank 1 (world_size 2) raised ValueError: lr must be below 1".
        body = _WORLD_SIZE.sub("", body)
    if "<class '" in body:
        body = _CLASS.sub(r"\1: ", body)
    if "object has no attribute" in body:
        body = _NO_ATTRIBUTE.sub("AttributeError: ", body)
    # CUDA errors in NCCL's lines have rules of their own, which say more.
    if ("rror" in body or "ERROR" in body or "failure" in body) and "NCCL" not in body:
        name = _CUDA_NAME.search(body)
        key = "" if name is None else (name["number"] or name["name"].replace("_", "").lower())
        message = _CUDA_ERRORS.get(key)
        has_message = message is not None and message in body
        if name is not None and has_message and body.startswith(f": {message}", name.end()):
            has_message = False  # the driver, XLA and TensorFlow print it: NAME: message
        if name is not None and message is not None and not has_message:
            body = f"{body[: name.start()]}CUDA error: {message} ({name[0]}){body[name.end() :]}"
    if "Os { code: " in body:
        body = _OS_OF_RUST.sub(r"\2 (os error \1)", body)
    if "(os error " in body:
        body = _OS_ERROR.sub(_as_errno, body)
    return body


def _as_errno(error: re.Match[str]) -> str:
    kind = "WinError" if error["windows"] or len(error["number"]) > _ERRNO_DIGITS else "Errno"
    return f"[{kind} {error['number']}] {error['windows'] or error['text']}"


def _is_raised_in(rule: LogRule, innermost: str | None) -> bool:
    if rule.raised_in is None or innermost is None:
        return False
    return rule.raised_in.search(innermost) is not None


def _place(rule: LogRule) -> tuple[bool, int, int]:
    """Return the full order of rules that match one line: `_strength`, then their order in RULES."""
    return *_strength(rule), _ORDER_OF[rule.code]


def _strength(rule: LogRule) -> tuple[bool, int]:
    """Return the order of rules that match one line: fallbacks last, then by how much they prove."""
    return rule.is_fallback, LEVELS[rule.level]


def _order(cause: Cause) -> tuple[int, bool, int]:
    is_recorded = cause.code == _REPORT or cause.code.startswith("DS-FLIGHT-")
    return LEVELS[cause.level], not is_recorded, cause.evidence[0][0] if cause.evidence else 0


def _cause_of(rule: LogRule, facts: dict[str, str]) -> Cause:
    return Cause(
        code=rule.code,
        kind=rule.kind,
        level=rule.level,
        retry=rule.retry,
        cause=rule.cause.format(**facts) if facts else rule.cause,
        fix=rule.fix.format(**facts) if facts else rule.fix,
        page=rule.page,
    )


def _rank_of(line: str) -> int | None:
    match = _search_rank(line)
    return None if match is None else int(match[match.lastgroup or 0])


def _search_rank(line: str) -> re.Match[str] | None:
    # Most lines name no rank, and searching them for every form of it takes ten times as long.
    if not line[:1].isdigit() and not any(word in line for word in _RANK_WORDS):
        return None
    return _RANK.search(line)


def explain_text(text: str) -> list[Cause]:
    """Return the causes found in a log that is a string."""
    reader = LogReader()
    reader.read_text(text)
    return reader.causes()
