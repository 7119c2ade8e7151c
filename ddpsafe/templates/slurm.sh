#!/bin/bash
# Training on several nodes of Slurm, from "ddpsafe template slurm":  sbatch --gpus-per-node=8 train.sh
# Lines marked with "edit" are yours; the others are there for a reason, which stands beside them.
#SBATCH --job-name=train
#SBATCH --nodes=2                # edit
#SBATCH --ntasks-per-node=1      # one launcher on each node; it starts a rank for each GPU or core
#SBATCH --cpus-per-task=4        # edit: cores of a node, for all its ranks and their DataLoader workers
#SBATCH --time=24:00:00          # edit
#SBATCH --requeue                # after a preemption or the loss of a node Slurm starts it again
#SBATCH --open-mode=append       # the output of a requeued job goes on where it was
#SBATCH --signal=USR1@600        # ten minutes before the time limit the ranks are asked to save
#SBATCH --output=train-%j.out

set -uo pipefail

# Not /dev/shm nor /tmp: a requeued job may get other nodes. Logs and reports are below node-*/.
run_dir="${SLURM_SUBMIT_DIR:-$PWD}/runs/$SLURM_JOB_ID"
mkdir -p "$run_dir"

# A restart starts everything again, so that the ranks may take as long to save as Slurm lets them.
export DDPSAFE_TIMEOUTS__STOP="${DDPSAFE_TIMEOUTS__STOP:-9min}"

# srun returns the highest code, which is 137 when one launcher was killed, and 75 on the others: so each
# node notes with which code its launcher has ended by itself. The shell ignores the signals to launchers.
ends="$run_dir/ends-${SLURM_RESTART_COUNT:-0}"
mkdir -p "$ends"
noting='trap : USR1 TERM INT; "$@"; code=$?; ((code == 0 || code > 128)) || touch "$0/$code"; exit $code'

# Nodes, their order, the endpoint and the job's id come from srun's variables.
# --kill-on-bad-exit=0: each launcher ends by itself and prints why, instead of being killed.
# --wait=60: the launchers end together, and a node without power never answers.
srun --kill-on-bad-exit=0 --wait=60 bash -c "$noting" "$ends" \
    ddpsafe run --run-dir "$run_dir" train.py # edit
code=$?

# 75: the ranks have saved and returned because they were asked to, or a node was lost. More than one such
# restart in a row costs nothing, so there is no limit. Any other failure ends the job with its code.
if [[ $(ls "$ends") == 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
