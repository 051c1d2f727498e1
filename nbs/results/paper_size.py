"""One real training step at the paper's full width, layers and segments, with one and two streams: peak memory, loss, seconds.

  PYTHONPATH=REPO:REPO/nbs/experiments OMP_NUM_THREADS=2 python paper_size.py    (a minute)

Writes paper_size.json beside this file if there is none. 06_cost reads it. The text is random, so that all clusters of words occur."""
import time
from pathlib import Path
import torch
from allatt_prune.config import get_recipe
from allatt_prune.engine.checkpoint import build
from allatt_prune.timing import train_job
from allatt_prune.training import make_optimizers
from experiment import peak_memory, recorded # of nbs/experiments

VOCABULARY, BATCHES = dict(text8=27, wt103=267_735), (1, 2)

def full_step(name, batch, vocab, **changes): # forward, backward, optimizer; missed: parameters without a gradient
    r = get_recipe(name, batch=batch, **changes)
    torch.manual_seed(0)
    model, cfg = build(r.config(vocab)), r.config(vocab)
    ids = torch.randint(vocab, (batch, cfg.mem_len + cfg.seg_len + 1))
    job, optimizer, since = train_job(model, ids), make_optimizers(model, None, r)[0], time.perf_counter()
    before = job().item()
    optimizer.step()
    seconds, after = time.perf_counter() - since, job().item()
    missed = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    return dict(recipe=name, batch=batch, vocab=vocab, loss=before, loss_after=after, seconds=seconds, peak_mb=peak_memory(job), missed=missed)

def full_steps(): return dict(steps=[full_step(name, b, vocab) for name, vocab in VOCABULARY.items() for b in BATCHES])

if __name__ == '__main__': recorded(Path(__file__).with_suffix('.json'), full_steps, __file__)
