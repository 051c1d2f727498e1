"The site: what its pages are made of, and, where the extra `docs` is installed, the pages."
import importlib.machinery, importlib.util, json, re, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT/'nbs').rglob('[!_]*.ipynb'))

def script(): # .ci/site as a module
    loader = importlib.machinery.SourceFileLoader('site_script', str(ROOT/'.ci'/'site'))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader('site_script', loader))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try: loader.exec_module(module)
    finally: sys.dont_write_bytecode = before
    return module

def test_every_notebook_is_in_one_room_and_in_the_order_of_the_numbers():
    rooms = script().rooms()
    assert list(rooms) == ['Start here', 'The method', 'The engine', 'Beyond the paper', 'Lessons', 'Experiments']
    names = [name for files in rooms.values() for name in files]
    assert sorted(names) == sorted({p.relative_to(ROOT/'nbs').with_suffix('').as_posix() for p in NOTEBOOKS} - {'one_page'}) # with which it opens
    for room in ('The method', 'The engine', 'Beyond the paper'): assert rooms[room] == sorted(rooms[room])
    assert [f.split('/')[1] for f in rooms['Lessons']] == ['own_text', 'own_choice', 'from_transformers', 'export']

@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_what_only_nbdev_needs_is_not_shown(path):
    shown, whole = (json.loads(text)['cells'] for text in (script().readable(path), path.read_text(encoding='utf-8')))
    code = [''.join(c['source']) for c in shown if c['cell_type'] == 'code']
    assert not any(re.search(r'^#\||nbdev_export\(\)', s, re.M) for s in code)
    hidden = [c for c in whole if re.match(r'#\| *(hide|default_exp)\b', ''.join(c['source']))]
    assert len(shown) == len(whole) - len(hidden)                                     # and nothing else is left out
    for c in whole: # where only the output is to be seen, it is text
        if ''.join(c['source']).startswith('#| echo: false'):
            text = ''.join(c['outputs'][0]['data']['text/markdown'])
            assert any((x['cell_type'], x['source']) == ('markdown', text) for x in shown)

@pytest.fixture(scope='module')
def site():
    pytest.importorskip('jupyter_book')
    done = subprocess.run([sys.executable, ROOT/'.ci'/'site'], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT/'_docs'/'html'

def test_pages_link_and_need_nothing_from_elsewhere(site):
    assert 'url=one_page.html' in (site/'index.html').read_text(encoding='utf-8')      # the site opens with the page
    for path in NOTEBOOKS:
        path = path.with_stem('overview' if path.stem == 'index' else path.stem)
        page = (site/path.relative_to(ROOT/'nbs').with_suffix('.html')).read_text(encoding='utf-8')
        needed = re.findall(r'(?:<script[^>]* src|<link[^>]* href|<img[^>]* src)="([^"#?]+)', page)
        assert needed and not [x for x in needed if re.match('https?:|//', x)]
        links = {x for x in re.findall(r'href="([^"#?]+)', page) + needed if ':' not in x}
        assert not [x for x in links if not ((site/path.relative_to(ROOT/'nbs')).parent/x).exists()]
        assert '#|' not in re.sub('<[^>]+>', '', page) and not re.search(r'class="[^"]*traceback', page)
        for room in script().ROOMS: assert f'{room}</span>' in page
    assert (site/'_static'/'mathjax'/'tex-chtml.js').exists() and 'tex-chtml.js' in (site/'method'/'01_attention.html').read_text(encoding='utf-8')

def test_every_floor_has_its_reference(site):
    for folder, name in (('method', 'remove_heads'), ('engine', 'load_corpus'), ('beyond', 'train_gates')):
        page = re.sub('<[^>]+>', '', (site/'api'/f'{folder}.html').read_text(encoding='utf-8'))
        assert re.search(rf'def {name}\(.+?# ', page, re.S)
    method = re.sub('<[^>]+>', '', (site/'api'/'method.html').read_text(encoding='utf-8'))
    assert 'def open_mask(self)' in method and 'unit: str' in method # what classes contain
    assert 'tag_hide-input' in (site/'experiments'/'which_heads.html').read_text(encoding='utf-8')

def test_search_knows_the_texts(site):
    index = (site/'searchindex.js').read_text(encoding='utf-8')
    assert all(word in index for word in ('persist', 'straight', 'attention', 'experiments/tables'))

def test_tables_in_outputs_are_tables(site):
    assert '<td' in (site/'experiments'/'tables.html').read_text(encoding='utf-8').split('class="cell_output', 1)[1]
