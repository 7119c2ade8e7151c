"""``ddpsafe run`` accepts command lines of torchrun as their authors published them.

``python -m torch.distributed.launch --use_env`` is torchrun under its old name. Shell variables have
their default, or a plausible value.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Final

import pytest
import scripts
from torch.distributed.launch import parse_args

from ddpsafe._commands.run import read_options
from ddpsafe.cli import make_parser

PUBLIC: Final = [
    ("karpathy/nanoGPT README.md", "--standalone --nproc_per_node=8 train.py config/train_gpt2.py"),
    ("karpathy/nanochat README.md",
        ("--standalone --nproc_per_node=8 -m scripts.base_train -- --depth=12 --run='d12' "
        "--model-tag='d12' --core-metric-every=999999 --sample-every=-1 --save-every=-1")),
    ("karpathy/nanochat README.md (dtype)", "--nproc_per_node=8 -m scripts.base_train"),
    ("KellerJordan/modded-nanogpt run.sh", "--standalone --nproc_per_node=1 train_gpt.py"),
    ("pytorch/torchtitan run_train.sh",
        ("--nproc_per_node=8 --rdzv_backend c10d --rdzv_endpoint='localhost:0' "
        "--local-ranks-filter 0 --role rank --tee 3 "
        "-m torchtitan.train --module llama3 --config llama3_debugmodel")),
    ("mlfoundations/open_clip README.md",
        ("--nproc_per_node 4 -m training.main --train-data '/data/cc12m/cc12m-train-{0000..2175}.tar' "
        "--train-num-samples 10968539 --dataset-type webdataset --batch-size 320 --precision amp "
        "--workers 4 --imagenet-val /data/imagenet/validation/")),
    ("mlfoundations/open_clip README.md (rendezvous)",
        "--nproc_per_node=4 --rdzv_endpoint=node-01:29400 -m training.main --dataset-type webdataset"),
    ("meta-llama/llama README.md",
        ("--nproc_per_node 1 example_chat_completion.py --ckpt_dir llama-2-7b-chat/ "
        "--tokenizer_path tokenizer.model --max_seq_len 512 --max_batch_size 6")),
    ("meta-llama/llama-cookbook getting-started/finetuning/multigpu_finetuning.md",
        ("--nnodes 1 --nproc_per_node 4  finetuning.py --enable_fsdp --model_name "
        "/path_of_model_folder/8B --use_peft --peft_method lora --output_dir Path/to/save/PEFT/model")),
    ("lm-sys/FastChat README.md", ("--nproc_per_node=4 --master_port=20001 fastchat/train/train_mem.py "
        "--model_name_or_path meta-llama/Llama-2-7b-hf --data_path data/dummy_conversation.json "
        "--bf16 True --output_dir output_vicuna --num_train_epochs 3")),
    ("huggingface/pytorch-image-models distributed_train.sh",
        "--nproc_per_node=4 train.py --data-dir /data/imagenet --model seresnet34 --sched cosine"),
    ("pytorch/examples distributed/FSDP/README.md", "--nnodes 1 --nproc_per_node 4  T5_training.py"),
    ("pytorch/examples distributed/FSDP2/README.md", "--nproc_per_node 2 example.py --explicit-prefetch"),
    ("pytorch/examples distributed/ddp/README.md", "--nnodes=1 --nproc_per_node=8 example.py"),
    ("pytorch/examples distributed/ddp/run_example.sh",
        "--nnodes=1 --nproc_per_node=2 --rdzv_id=101 --rdzv_endpoint='localhost:5972' example.py"),
    ("pytorch/examples distributed/minGPT-ddp/run_example.sh", "--standalone --nproc_per_node=16 main.py"),
    ("pytorch/examples distributed/tensor_parallelism/README.md",
        "--nnodes=1 --nproc_per_node=4 tensor_parallel_example.py"),
    ("pytorch/vision references/classification/README.md",
        "--nproc_per_node=8 --use_env train.py --model resnext50_32x4d --epochs 100"),
    ("facebookresearch/detr README.md",
        ("--nproc_per_node=8 --use_env main.py --masks --epochs 25 --lr_drop 15 --coco_path "
        "/path/to/coco --coco_panoptic_path /path/to/coco_panoptic --dataset_file coco_panoptic")),
    ("facebookresearch/dino README.md",
        ("--use_env --nproc_per_node=1 eval_image_retrieval.py --imsize 512 --multiscale 1 "
        "--data_path /path/to/revisited_paris_oxford/ --dataset rparis6k")),
]  # fmt: skip
"""Command lines for one node: where each was published, and the arguments of torchrun."""


@pytest.mark.parametrize(("source", "line"), PUBLIC)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old name is deprecated
def test_public_command_lines_are_parsed_as_by_torchrun(source: str, line: str) -> None:
    """The result is the same script or module, arguments and number of ranks."""
    arguments = shlex.split(line)
    options = make_parser().parse_args(["run", *arguments])
    fields, _ = read_options(options)
    theirs = parse_args(arguments)
    assert (options.script, options.arguments) == (
        theirs.training_script,
        theirs.training_script_args,
    ), source
    assert (options.module, fields["nproc_per_node"]) == (theirs.module, theirs.nproc_per_node)


RUN: Final[list[Any]] = [
    "karpathy/nanochat README.md",
    "pytorch/torchtitan run_train.sh",
    "pytorch/examples distributed/ddp/run_example.sh",
    "facebookresearch/detr README.md",
]
"""Command lines with different kinds of options, run with two ranks instead of eight."""

SCRIPT: Final = """
import os, pathlib, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
ranks = torch.tensor(float(dist.get_rank()))
dist.all_reduce(ranks)
said = [int(ranks), *sys.argv[1:]]
pathlib.Path(f"said-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").write_text(repr(said))
dist.destroy_process_group()
os._exit(0)  # its exit code counts, also where a rank leaves Python
"""


@pytest.mark.full(but=["pytorch/torchtitan run_train.sh"])
@pytest.mark.parametrize("source", RUN)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_public_command_lines_run_unchanged(source: str, tmp_path: Path) -> None:
    """Their ranks form a group, and the script receives its arguments."""
    arguments = shlex.split(dict(PUBLIC)[source].replace("nproc_per_node=8", "nproc_per_node=2"))
    theirs = parse_args(arguments)
    name = theirs.training_script
    path = f"{name.replace('.', '/')}.py" if theirs.module else name
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).parent.joinpath("__init__.py").touch()  # before the kit of that name
    (tmp_path / path).write_text(SCRIPT)
    command = ["-m", "ddpsafe", "run", *arguments]
    done = scripts.Script(command, folder=tmp_path).end()
    assert done.code == 0, done.err
    said = repr([1, *theirs.training_script_args])
    found = {file.name: file.read_text() for file in tmp_path.glob("said-*")}
    assert found == {"said-0-of-2": said, "said-1-of-2": said}
