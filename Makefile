# `make demo` and `make test` are the two commands to know; each installs what is missing first.
BUILD ?= build
JOBS ?= $(shell nproc)
NINJA = tools/heartbeat.sh build cmake --build $(BUILD) -j $(JOBS)
# The demo and the tools find the build's libtorch by rpath; nothing is written outside the checkout.

.DEFAULT_GOAL := build
.PHONY: help build demo test check soak bench install format clean setup

help:
	@echo "make [build]  demo  test  check  soak  bench  install PREFIX=...  format  clean (see README.md)"

setup:
	@tools/setup.sh

$(BUILD)/build.ninja: | setup
	@cmake -S . -B $(BUILD) -G Ninja > $(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }; mv $(BUILD).log $(BUILD)/configure.log

build: setup $(BUILD)/build.ninja
	@$(NINJA) --target parvl

all: setup $(BUILD)/build.ninja
	@$(NINJA)

demo: build
	@examples/demo.sh

test: all
	@tools/setup.sh tests
	@python3 tests/run.py --build $(BUILD)

check: all
	@tools/setup.sh tests
	@python3 tests/run.py --build $(BUILD) --quick

soak: all
	@tools/setup.sh tests
	@python3 tests/soak.py --build $(BUILD)

bench: all
	@tools/setup.sh tests
	@python3 bench/run.py --build $(BUILD)

PREFIX ?= /usr/local
install: build
	@cmake --install $(BUILD) --prefix $(PREFIX)

format:
	@git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format -i

clean:
	@rm -rf $(BUILD)
