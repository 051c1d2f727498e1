"What importing and asking for help costs, and which names there are."
import importlib, json, os, re, subprocess, sys
from pathlib import Path
import pytest
import allatt_prune

def python(*args): return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent.parent)

SCRIPT = re.search('^console_scripts = allatt-prune=(.+):(.+)$', (Path(__file__).parent.parent/'settings.ini').read_text(encoding='utf-8'), re.M)
COMMANDS = [sys.executable, '-m', 'allatt_prune'], [sys.executable, '-c', 'from {} import {} as start; start()'.format(*SCRIPT.groups())]
SLOW = 'torch', 'transformers', 'matplotlib', 'safetensors', 'pooch'

@pytest.mark.parametrize('command', COMMANDS, ids=['module', 'script'])
@pytest.mark.parametrize('asked', ['--help', '-h', 'run --help', 'prune tiny-books --help', 'time -h', 'score --help'])
def test_help_comes_without_slow_libraries(command, asked):
    done = subprocess.run([*command, *asked.split()], capture_output=True, text=True, timeout=300, env=os.environ | dict(PYTHONPROFILEIMPORTTIME='1'))
    loaded = {line.split('|')[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and done.stdout.startswith('usage: allatt-prune') and 'allatt_prune.engine.cli' in loaded, done.stderr[-500:]
    assert not loaded & set(SLOW)
    if 'prune' in asked: # that model's; the text is the one that is read, not the novels that it has learned
        for said in ('tiny-books: 12,000 steps, roughly 8 minutes on a CPU', "or else pydocs, Python's documentation) --unit"): assert said in ' '.join(done.stdout.split())

def test_a_mistake_is_one_line_without_slow_libraries():
    for words, said in (('fly --help', "argument command: invalid choice: 'fly'"), ('run --steps ten', "argument --steps: invalid int value: 'ten'"),
                        ('run --repair scaled', "argument --repair: invalid choice: 'scaled'")):
        done = python('-c', f"import sys; sys.argv[1:] = {words.split()}\nfrom allatt_prune.engine.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)")
        assert (done.returncode, done.stdout) == (2, 'False\n') and done.stderr.startswith(f'allatt-prune: error: {said}') and done.stderr.count('\n') == 1

NAMES = dict(LM='model', LMConfig='config', HeadGates='gates', load_corpus='engine.corpora', get_recipe='config', train='training', evaluate='training', remove_heads='remove', text_for='engine.run', run='engine.run')

def test_public_names_are_those_of_their_modules():
    everything = {}
    exec('from allatt_prune import *', everything)
    for name, home in NAMES.items():
        assert everything[name] is getattr(allatt_prune, name) is getattr(importlib.import_module(f'allatt_prune.{home}'), name)
    assert {*NAMES, '__version__'} == {*dir(allatt_prune)} and {*allatt_prune.__all__} == {*NAMES}
    with pytest.raises(AttributeError, match="module 'allatt_prune' has no attribute 'fly'"): allatt_prune.fly

def test_an_import_has_no_side_effects():
    for argv in (['-m'], ['/usr/bin/allatt-prune'], ['-c']):                                 # as the command itself is started
        done = python('-c', f"""import signal, sys
sys.argv = sys.orig_argv = [*{argv}, 'allatt_prune']
before = signal.getsignal(signal.SIGINT)
import allatt_prune
assert signal.getsignal(signal.SIGINT) is before and not {{'torch', 'numpy', 'pooch'}} & {{*sys.modules}}""")
        assert done.returncode == 0, done.stderr

FORKS = """import json, os, sys, traceback
import torch, safetensors.torch, einops, fastcore.basics, fastcore.docments, tqdm, pooch, filelock, matplotlib
for code in json.loads(sys.argv[1]):
    if not (pid := os.fork()):
        try: exec(code, {})
        except BaseException: print(code, traceback.format_exc(), sep='\\n', flush=True); os._exit(1)
        os._exit(0)
    os.waitpid(pid, 0)"""

def each_in_a_new_process(codes): # which has loaded PyTorch, but nothing of ours
    done = python('-c', FORKS, json.dumps(codes))
    assert (done.returncode, done.stdout) == (0, ''), done.stdout + done.stderr

HOME = Path(allatt_prune.__file__).parent
MODULES = ['.'.join(p.relative_to(HOME).with_suffix('').parts) for p in HOME.rglob('[a-z]*.py') if p.stem not in ('hf', 'hf_models')]

def test_the_first_import_may_be_any():
    assert len(MODULES) > 20
    complete = 'LM.save_pretrained, LM.from_pretrained, LM.generate'
    each_in_a_new_process([f'{first}\nfrom allatt_prune import LM\n{complete}' for first in ('', *(f'import allatt_prune.{m}' for m in MODULES))])

ORDERS = """import allatt_prune.training
from allatt_prune import train
from allatt_prune.training import evaluate
assert callable(train) and allatt_prune.train is train and train.__module__ == 'allatt_prune.training'""".splitlines()

def test_train_is_the_function_whatever_is_imported_first():
    firsts = *ORDERS[:3], 'import allatt_prune', 'import allatt_prune.engine.resume', 'import allatt_prune.engine.cli'
    each_in_a_new_process(['\n'.join([first, *ORDERS, ORDERS[0], ORDERS[3]]) for first in firsts])
