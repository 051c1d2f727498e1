"What importing and asking for help costs, and that old names stay."
import os, subprocess, sys
from pathlib import Path
import pytest

def python(*args): return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent.parent)

COMMANDS = [sys.executable, '-m', 'allatt_prune'], [str(Path(sys.executable).with_name('allatt-prune'))]
SLOW = 'torch', 'matplotlib', 'safetensors', 'pooch', 'allatt_prune.cli'

@pytest.mark.parametrize('command', COMMANDS, ids=['module', 'script'])
@pytest.mark.parametrize('asked', ['--help', '-h', 'run --help', 'prune tiny-books --help', 'time -h', 'download --help'])
def test_help_comes_without_slow_libraries(command, asked):
    done = subprocess.run([*command, *asked.split()], capture_output=True, text=True, timeout=300, env=os.environ | dict(PYTHONPROFILEIMPORTTIME='1'))
    loaded = {line.split('|')[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and done.stdout.startswith('usage: allatt-prune') and 'allatt_prune.options' in loaded, done.stderr[-500:]
    assert not loaded & set(SLOW)

def test_a_mistake_beside_help_is_still_one_line():
    done = python('-m', 'allatt_prune', 'fly', '--help')
    assert (done.returncode, done.stdout) == (2, '') and done.stderr.startswith("allatt-prune: error: argument command: invalid choice: 'fly'") and done.stderr.count('\n') == 1

def cpu_seconds(code): # of a process, beside what the system does for it
    done = python('-c', f'import os\n{code}\nprint(os.times().user)')
    assert done.returncode == 0, done.stderr
    return float(done.stdout)

def test_importing_takes_less_than_two_seconds_beyond_torch():
    for what in ('allatt_prune', 'allatt_prune.cli'):
        assert min(cpu_seconds(f'import {what}') for _ in range(3)) - min(cpu_seconds('import torch') for _ in range(3)) < 2

def test_names_that_moved_are_where_they_were():
    from allatt_prune import config, corpora, data, load_corpus, model, recipe, train
    assert model.LMConfig is config.LMConfig and train.get_recipe is recipe.get_recipe and load_corpus is corpora.load_corpus
    assert callable(data.load_corpus)

def test_the_first_import_may_be_any():
    for first in ('model', 'recipe', 'data', 'config', 'options', 'cli'):
        done = python('-c', f'import allatt_prune.{first}\nfrom allatt_prune.model import LM\nLM.from_pretrained("tiny-books"); LM.infer')
        assert done.returncode == 0, done.stderr
