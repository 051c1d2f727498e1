"What the experiments print is what their files of results say."
import contextlib, re
from pathlib import Path
import pytest
from execnb.nbio import read_nb
from execnb.shell import CaptureShell

FOLDER = Path(__file__).parent.parent/'nbs'/'experiments'
NOTEBOOKS = sorted(FOLDER.glob('*.ipynb'))

def printed(cell): # as a list of texts; figures are not compared
    for out in cell.get('outputs', []):
        data = out.get('data', {})
        text = out.get('text') or data.get('text/markdown') or ('' if 'image/png' in data else data.get('text/plain', ''))
        yield ''.join(text).strip()

@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_every_printed_table_follows_from_the_results(path):
    assert path.stem == 'books' or (FOLDER.parent/'results'/f'{path.stem}.json').exists() # or it would be made here
    shell, compared = CaptureShell(), 0
    shell.run_cell('%matplotlib inline')
    with contextlib.chdir(path.parent):
        for cell in read_nb(path).cells:
            source = ''.join(cell.source)
            if source.startswith('## The smallest form'): break                     # that runs with the notebook's own tests
            if cell.cell_type != 'code': continue
            before = [t for t in printed(cell) if t]
            shell.cell(cell)
            if shell.exc: raise shell.exc
            assert [t for t in printed(cell) if t] == before, source
            compared += len(before)
    assert compared >= 2

def test_the_first_page_says_what_the_verdicts_say():
    readme = (FOLDER.parent.parent/'README.md').read_text(encoding='utf-8')
    for path in NOTEBOOKS:
        after = ''.join(''.join(c.source) + '\n' for c in read_nb(path).cells if c.cell_type == 'markdown').partition('## The verdict')[2]
        if not after: continue                                                      # books.ipynb has none
        verdict = re.match(r'\s*\*\*([^*]+?)[.:]?\*\*', after)[1]
        lines = [line for line in readme.splitlines() if f'experiments/{path.name})' in line and f'**{verdict}**' in line]
        assert lines, f'{path.name}: README.md does not say **{verdict}**'
