"Everything about the package stands in settings.ini; this file only hands it to setuptools."
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

ini = ConfigParser(delimiters=['='])
ini.read('settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
extras = {key.removesuffix('_requirements'): cfg[key].split() for key in cfg if key.endswith('_requirements')}

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'],
    author=cfg['author'], license='Apache-2.0', classifiers=cfg['classifiers'].splitlines(),
    long_description=Path('README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    packages=find_packages(include=[cfg['lib_name'], cfg['lib_name'] + '.*']), package_data={cfg['lib_name']: ['models/*/*']},
    python_requires='>=' + cfg['min_python'],
    install_requires=cfg['requirements'].split(), extras_require=extras,
    entry_points={'console_scripts': cfg['console_scripts'].split()},
)
