# make perf    time the ladder against its peers on this machine's GPU; without one, compile and inspect it
# make test    lint and run the test suite; what needs a GPU skips there with a reason
#
# Both make the virtual environment first. A PyTorch that the Python in use already has is kept
# (GPU machines bring their own); otherwise the tested version is installed.
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= test

bin := $(VENV)/bin
has_torch := $(shell $(PYTHON) -c "import importlib.util as u; print('yes' if u.find_spec('torch') else '')" 2>/dev/null)

.PHONY: perf test clean

perf: $(VENV)/ready
	$(bin)/python -m perf

test: $(VENV)/ready
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/python -m pytest -n auto

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(if $(has_torch),--system-site-packages) $(VENV)
	grep -v $(if $(has_torch),'^torch==',-x '') constraints.txt > $(VENV)/constraints.txt
	$(bin)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
