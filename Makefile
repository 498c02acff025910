# The two commands of the README are `make demo` and `make test`; the rest is for developers.
BUILD ?= build
NINJA_FLAGS ?=

.PHONY: build demo test bench test-gpu bench-gpu format setup clean

setup:
	@tools/bootstrap.sh

$(BUILD)/build.ninja: | setup
	@cmake -G Ninja -S . -B $(BUILD) -DCMAKE_BUILD_TYPE=Release $(CMAKE_FLAGS) > /dev/null

build: setup $(BUILD)/build.ninja
	@cmake --build $(BUILD) $(NINJA_FLAGS)

# The program alone: the tests and the GPU kernels take longer to build than the demo to run.
demo: setup $(BUILD)/build.ninja
	@cmake --build $(BUILD) $(NINJA_FLAGS) --target plumb
	@tools/demo.sh $(BUILD)/plumb

test:
	@tools/bootstrap.sh tests
	@$(MAKE) --no-print-directory build
	@ctest --test-dir $(BUILD) -j2 --output-on-failure --no-tests=error

bench: build
	@tools/bench.sh $(BUILD)

test-gpu bench-gpu:
	@tools/$@.sh

format:
	@git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

clean:
	@rm -rf $(BUILD)
