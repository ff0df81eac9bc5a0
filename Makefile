# `make` alone says what there is. Every target gets what it needs by itself: a Debian machine with Go (the version that hack/need-go.sh wants), make and root is enough.

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
IMAGE   ?= gpu-dra-driver:$(VERSION)
# What the Dockerfile takes: BUILDER, its base image; GOPROXY, GOFLAGS, GOMODCACHE, GOCACHE, Go's settings.
BUILD_ARGS ?=
# docker, podman or buildah, whichever is there.
ENGINE  ?= $(firstword $(notdir $(foreach b,docker podman buildah,$(shell command -v $(b) 2>/dev/null))))

CACHE  := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpu-dra-driver
BUILD  := $(CURDIR)/build
NEED   := hack/need.sh
# The bindings of NVML call what NVIDIA has marked as deprecated.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

# A linter that another version of the module file was built from has another name, so that it is built anew.
LINT := $(CACHE)/bin/golangci-lint-$(shell cat hack/tools/go.mod hack/tools/go.sum | sha256sum | cut -c1-12)
CLUSTER := go run ./test/cluster/cmd/cluster
# go test, with a list of the skipped tests at the end.
GOTEST := go run ./hack/gotest

# What unit tests alone must cover of pkg/, in percent.
COVERAGE := 80
# Rooms without a goroutine: the race detector would find nothing there, and their long tests would take many times as long.
PURE := ./api/... ./pkg/claim/... ./pkg/device/... ./pkg/health/...
# Rooms that meet every call and every write with every fault: all of them without the race detector, a sample (-short) with it.
LONG := ./pkg/nvidia ./pkg/prepare
# A process with the race detector would wait a second before it ends, and many tests start and end many.
export GORACE ?= atexit_sleep_ms=0
ROOMS := $(filter-out $(PURE),$(addsuffix /...,$(wildcard ./pkg/*)))
UNIT := $(ROOMS) ./cmd/... ./hack/... ./test/bench/cmd/... ./test/bench/report/... ./test/chart/... ./test/cluster/... ./test/neighbours/...

.DEFAULT_GOAL := help
.PHONY: help
help: ## Show this list
	@echo "gpu-dra-driver: NVIDIA GPUs for Kubernetes by Dynamic Resource Allocation"
	@echo
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Build

.PHONY: build
build: toolchain ## Build the plugin, its hooks and the host of MPS daemons into build/bin
	go build -tags grpcnotrace -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$(VERSION)" -o $(BUILD)/bin/gpu-kubelet-plugin ./cmd/gpu-kubelet-plugin
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$(VERSION)" -o $(BUILD)/bin/gpu-mps ./cmd/gpu-mps
	go build -trimpath -buildvcs=false -tags netgo,osusergo -ldflags "-s -w -extldflags=-static" \
	    -o $(BUILD)/bin/nvidia-cdi-hook github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook 2>$(BUILD)/hook.log || { cat $(BUILD)/hook.log; exit 1; }

.PHONY: sbom
sbom: build ## List what is linked into each program, with licences (CycloneDX), in build/sbom
	cd hack/sbom && go vet . && go test . && go run . -out $(BUILD)/sbom $(addprefix $(BUILD)/bin/,gpu-kubelet-plugin gpu-mps nvidia-cdi-hook)

.PHONY: reproducible
reproducible: build ## Build the programs again in another folder, and compare (FRESH=1: compile everything again too)
	hack/reproducible.sh $(BUILD)/bin $(VERSION) $(if $(FRESH),$(CACHE)/reproducible)

.PHONY: image
image: ## Build the image (IMAGE, VERSION, ENGINE=docker|podman|buildah, BUILD_ARGS="BUILDER=… GOPROXY=…")
	@test -n "$(ENGINE)" || { echo "make image: none of docker, podman, buildah is installed"; exit 1; }
	$(ENGINE) build --build-arg VERSION=$(VERSION) $(addprefix --build-arg ,$(BUILD_ARGS)) -t $(IMAGE) -f Dockerfile .

##@ Test

.PHONY: check
check: vet lint helm-lint sbom reproducible ## Look without running: go vet, the linters, helm lint, what is linked into the programs, and whether they are the same wherever they are built

.PHONY: test
test: test-unit test-faults test-sim test-e2e ## Run every test: unit, random faults, simulated GPU, real cluster

# More packages at once than there are cores (-p): many tests wait for processes to be ended.
.PHONY: test-unit
test-unit: toolchain ## Unit and chart tests, with the race detector and the coverage of pkg/
	@mkdir -p $(BUILD)
	$(GOTEST) -covermode=atomic -coverpkg=./pkg/... -coverprofile=$(BUILD)/pure.out $(PURE) $(LONG)
	helm=$$($(CLUSTER) program helm) && \
	HELM=$$helm $(GOTEST) -p 4 -race -short -coverpkg=./pkg/... -coverprofile=$(BUILD)/cover.out $(UNIT)
	@tail -n +2 $(BUILD)/pure.out >>$(BUILD)/cover.out
	@go tool cover -func=$(BUILD)/cover.out | awk '/^total:/ { print "coverage of pkg/ by unit tests: " $$3; exit $$3+0 < $(COVERAGE) }'

# Which schedules of faults are run: so many seeds from this one on. A seed tells the same story each time.
SEED      ?= 1
SCHEDULES ?= 500
POLICIES  ?= 2000

.PHONY: test-faults
test-faults: toolchain ## Random schedules of faults over the real transaction, checked after each (SEED=1 SCHEDULES=500 POLICIES=2000)
	$(GOTEST) ./test/schedules/worth
	$(GOTEST) -count=1 -timeout 60m ./test/schedules -args -seed=$(SEED) -schedules=$(SCHEDULES) -policies=$(POLICIES)

# How long each fuzz target is run, and which (a regular expression over package.Target).
FUZZTIME ?= 60s
FUZZ     ?= .

.PHONY: fuzz
fuzz: toolchain ## Run every fuzz target in turn (FUZZTIME=60s; FUZZ=pkg/claim for some)
	hack/fuzz.sh $(FUZZTIME) '$(FUZZ)'

.PHONY: test-faults-long
test-faults-long: toolchain ## 10,000 schedules, in which every step has to meet every fault 20 times (build/faults.md has the table; a few minutes)
	@mkdir -p $(BUILD)
	go test -count=1 -timeout 120m -run '^TestWhateverGoesWrong' ./test/schedules -args -schedules=10000 -least=20 -table=$(BUILD)/faults.md

.PHONY: test-faults-worth
test-faults-worth: toolchain ## Put one mistake after the other into the code, and see that the schedules find each (SCHEDULES=500; five minutes)
	go run ./test/schedules/worth -schedules $(SCHEDULES)

.PHONY: test-sim
test-sim: toolchain ## The simulated GPU library: its own tests, sanitizers, the conformance suite, hwcheck run against it, every fault of a cut, and every kind of allocation
	$(MAKE) --no-print-directory -C test/nvmlsim
	$(GOTEST) ./test/nvmlsim/... ./test/hwcheck/... ./test/faults/... ./test/allocation/...

# Programs to measure, in turns: PROGRAMS=before=/tmp/old,after=build/bin/gpu-kubelet-plugin; without it the one of this checkout.
PROGRAMS ?= $(BUILD)/bin/gpu-kubelet-plugin
BENCH := go run ./test/bench/cmd/bench -programs $(PROGRAMS) -json $(BUILD)/bench.json

.PHONY: bench
bench: build ## Measure what the plugin costs, beside the floor of what safety alone costs, on a machine that does nothing else (root; BENCH_ARGS="-only single")
	$(BENCH) $(BENCH_ARGS)

.PHONY: bench-quick
bench-quick: build
	$(BENCH) -quick $(BENCH_ARGS)

.PHONY: bench-scale
bench-scale: build ## Measure what our slices cost the schedulers of Kubernetes 1.37.0 and 1.36.3 with 500 nodes, on an idle machine (root; SCALE_ARGS="-kubernetes v1.37.0")
	go run ./test/bench/cmd/scale -program $(BUILD)/bin/gpu-kubelet-plugin -json $(BUILD)/scale.json $(SCALE_ARGS)

# How often each benchmark is run: benchstat takes ten to tell a change from noise.
COUNT ?= 10

.PHONY: bench-go
bench-go: toolchain ## Measure the rooms that do no I/O, and what lists records, in build/bench-go.txt for benchstat (COUNT=10)
	@mkdir -p $(BUILD)
	go test -run '^$$' -bench . -count $(COUNT) $(PURE) ./pkg/checkpoint ./pkg/cdi ./pkg/durable | tee $(BUILD)/bench-go.txt

.PHONY: bench-pods
bench-pods: toolchain ## Measure how much later a Pod starts because it claims a GPU, on a real cluster, on a machine that does nothing else (root; PODS_ARGS="-pods 20")
	@mkdir -p $(BUILD)
	go run ./test/bench/cmd/pods -json $(BUILD)/pods.json $(PODS_ARGS)

.PHONY: bench-limits
bench-limits: toolchain ## Hold what many claims for partitions at once cost to its limits, on a machine that does nothing else (root)
	$(GOTEST) -v -count=1 ./test/bench

# Suites on clusters side by side: each takes about a minute of the processor's time, in two to four minutes.
SUITES ?= 3

.PHONY: test-e2e
test-e2e: toolchain ## The chart, the image and the plugin on a real cluster with simulated GPUs (root)
	go test -count=1 -timeout 20m -tags cluster ./test/cluster
	$(MAKE) --no-print-directory bench-quick
	$(GOTEST) -v -count=1 -parallel $(SUITES) -timeout 60m ./test/e2e/...

# How many Pods, and after how many seconds the plugin and the kubelet are killed again.
SOAK := SOAK_PODS=2000 SOAK_KILL_PLUGIN=20 SOAK_KILL_KUBELET=120

.PHONY: soak
soak: toolchain ## Thousands of Pods with devices of every kind while plugin and kubelet are killed over and over; half an hour or more (root; SOAK="SOAK_PODS=10000 …")
	$(SOAK) $(GOTEST) -v -count=1 -timeout 12h ./test/e2e/... -run 'TestSoak$$'

.PHONY: hwcheck
hwcheck: toolchain ## Build the folder build/hwcheck, which checks a real GPU without Go or network; it only reads
	hack/hwcheck.sh $(BUILD)/hwcheck

##@ See it work

.PHONY: demo
demo: toolchain ## A real cluster with a simulated 8-GPU node; a claimed Pod runs nvidia-smi (root)
	@mkdir -p $(BUILD)/bin
	go build -o $(BUILD)/bin/demo ./hack/demo
	$(BUILD)/bin/demo up

.PHONY: demo-down
demo-down: toolchain ## Take the demo's cluster away; build/ and the caches stay
	go run ./hack/demo down

.PHONY: reference
reference: ## Write the tables of docs/reference.md from the plugin's settings and the chart's values
	go run ./hack/reference

.PHONY: clean
clean: ## Remove build/; the caches below ~/.cache/gpu-dra-driver stay
	rm -rf $(BUILD)

# --- parts of the above ----------------------------------------------------------------------------------------------------------

.PHONY: toolchain
toolchain:
	@hack/need-go.sh
	@$(NEED) gcc /usr/include/stdlib.h=libc6-dev nm=binutils

.PHONY: vet
vet: toolchain
	go vet -tags cluster ./...

.PHONY: lint
lint: toolchain $(LINT)
	$(LINT) run ./...

$(LINT): hack/tools/go.mod hack/tools/go.sum
	@echo "building golangci-lint: a minute or two, once"
	@mkdir -p $(@D)
	cd hack/tools && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o $@.tmp github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@mv $@.tmp $@

# helm comes from the test cluster's programs, in the version that the tests run.
.PHONY: helm-lint
helm-lint: toolchain
	@helm=$$($(CLUSTER) program helm) && \
	$$helm lint --strict deployments/helm/gpu-dra-driver && \
	$$helm lint --strict deployments/helm/gpu-dra-driver --values test/e2e/values.yaml
