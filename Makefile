# `make` lists the targets. Each target installs what it needs, on a Debian machine with make,
# root and the Go that hack/need-go.sh checks for.

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
IMAGE   ?= gpu-dra-driver:$(VERSION)
# Arguments of the Dockerfile: BUILDER (base image), GOPROXY, GOFLAGS, GOMODCACHE, GOCACHE.
BUILD_ARGS ?=
# The first of docker, podman and buildah that is installed.
ENGINE  ?= $(firstword $(notdir $(foreach b,docker podman buildah,$(shell command -v $(b) 2>/dev/null))))

CACHE  := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpu-dra-driver
BUILD  := $(CURDIR)/build
BIN    := $(BUILD)/bin
NEED   := hack/need.sh
# The NVML bindings call deprecated functions.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

# The linter has the hash of its module file in its name. So a change of that file rebuilds it.
LINT := $(CACHE)/bin/golangci-lint-$(shell cat hack/tools/go.mod hack/tools/go.sum | sha256sum | cut -c1-12)
# The documentation's linter, named in the same way.
VALE := $(CACHE)/bin/vale-$(shell cat hack/vale/go.mod hack/vale/go.sum | sha256sum | cut -c1-12)
CLUSTER := go run ./test/cluster/cmd/cluster
# go test, which lists the skipped tests at its end.
GOTEST := go run ./hack/gotest

# Minimum coverage of pkg/ by unit tests, in percent.
COVERAGE := 80
# Packages without goroutines. The race detector would find nothing and make their tests slow.
PURE := ./api/... ./pkg/claim/... ./pkg/device/... ./pkg/health/...
# Packages whose tests inject every fault into every call and write. They run completely without the
# race detector, and as a sample (-short) with it.
LONG := ./pkg/nvidia/bind ./pkg/nvidia/cut ./pkg/prepare
# More packages and tests at once than cores, because many wait for processes to end.
AT_ONCE := -p 4 -parallel 4
# By default a process with the race detector waits a second before it ends.
export GORACE ?= atexit_sleep_ms=0
PACKAGES := $(filter-out $(PURE),$(addsuffix /...,$(wildcard ./pkg/*)))
UNIT := $(PACKAGES) ./cmd/... ./hack/... ./test/bench/cmd/... ./test/bench/report/... \
	./test/chart/... ./test/cluster/... ./test/neighbours/...

.DEFAULT_GOAL := help
.PHONY: help
help: ## Show this list
	@echo "gpu-dra-driver: NVIDIA GPUs for Kubernetes by Dynamic Resource Allocation"
	@echo
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Build

.PHONY: build
build: toolchain ## Build the plugin, its hooks, the MPS supervisor and kubectl-gpu into build/bin
	@mkdir -p $(BIN)
	go build -tags grpcnotrace -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$(VERSION)" \
	    -o $(BIN)/gpu-kubelet-plugin ./cmd/gpu-kubelet-plugin
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$(VERSION)" \
	    -o $(BIN)/gpu-mps ./cmd/gpu-mps
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$(VERSION)" \
	    -o $(BIN)/kubectl-gpu ./cmd/kubectl-gpu
	go build -trimpath -buildvcs=false -tags netgo,osusergo -ldflags "-s -w -extldflags=-static" \
	    -o $(BIN)/nvidia-cdi-hook github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook 2>$(BIN)/hook.log || \
	    { cat $(BIN)/hook.log; exit 1; }
	@rm -f $(BIN)/hook.log

.PHONY: sbom
sbom: build ## List the modules and licences of each program (CycloneDX) in build/sbom
	cd hack/sbom && go vet . && go test . && go run . -out $(BUILD)/sbom $(addprefix $(BUILD)/bin/,gpu-kubelet-plugin gpu-mps kubectl-gpu nvidia-cdi-hook)

.PHONY: reproducible
reproducible: build ## Build the programs in another folder too, and compare (FRESH=1: without caches)
	hack/reproducible.sh $(BUILD)/bin $(VERSION) $(if $(FRESH),$(CACHE)/reproducible)

.PHONY: image
image: ## Build the image (IMAGE, VERSION, ENGINE=docker|podman|buildah, BUILD_ARGS="BUILDER=… GOPROXY=…")
	@test -n "$(ENGINE)" || { echo "make image: none of docker, podman, buildah is installed"; exit 1; }
	$(ENGINE) build --build-arg VERSION=$(VERSION) $(addprefix --build-arg ,$(BUILD_ARGS)) -t $(IMAGE) -f Dockerfile .

##@ Release

# Where users will pull image and chart. The default is the repository in the chart's values.
REGISTRY ?= $(shell sed -n 's,^  repository: \(.*\)/gpu-dra-driver$$,\1,p' deployments/helm/gpu-dra-driver/values.yaml)
RELEASE_DIR ?= $(BUILD)/release
# KEY and PUBLIC_KEY are a pair of "cosign generate-key-pair". FROM is the folder or the registry to
# verify.
FROM     ?= $(RELEASE_DIR)
RELEASE  := $(BUILD)/bin/release

.PHONY: release
release: release-programs-amd64 release-programs-arm64 release-client ## Make image, chart and archives of kubectl-gpu in build/release (VERSION=v0.1.0 REGISTRY=registry.example/project; KEY=cosign.key signs)
	helm=$$($(CLUSTER) program helm) && \
	$(RELEASE) build -version $(VERSION) -registry '$(REGISTRY)' -programs $(BUILD)/release-programs -c-library $(CACHE)/c-library \
	    -chart $(CURDIR)/deployments/helm/gpu-dra-driver -helm $$helm -out $(RELEASE_DIR)
	$(if $(KEY),$(RELEASE) sign -key $(KEY) $(RELEASE_DIR))

.PHONY: release-push
release-push: release-tool ## Push the release in build/release with its signatures (REGISTRY=…: elsewhere than where it was made for)
	$(RELEASE) push $(if $(filter command line,$(origin REGISTRY)),-to $(REGISTRY)) $(RELEASE_DIR)

.PHONY: release-verify
release-verify: release-tool ## Verify a release's digests, signatures, contents and provenance (VERSION, PUBLIC_KEY=cosign.pub FROM=folder or registry)
	$(RELEASE) verify -key $(PUBLIC_KEY) -version $(VERSION) $(FROM)

.PHONY: krew
krew: toolchain ## Write the krew manifest of a release's kubectl-gpu archives into build/gpu.yaml (VERSION, URL=https://… of the archives)
	go run ./hack/krew -version '$(VERSION)' -release $(RELEASE_DIR) -url '$(URL)' >$(BUILD)/gpu.yaml

# Fails before anything is compiled.
.PHONY: release-version
release-version: release-tool
	@$(RELEASE) check -version '$(VERSION)'

.PHONY: release-tool
release-tool: toolchain
	@cd hack/release && go build -o $(RELEASE) .

TRIPLET_amd64 := x86_64-linux-gnu
TRIPLET_arm64 := aarch64-linux-gnu

# The compiler for an architecture, with Debian's newest C library. -B comes before the C library of
# the compiler's own package, which gets no updates.
cross = $(TRIPLET_$(1))-gcc --sysroot=$(CACHE)/c-library/$(1)/root -B$(CACHE)/c-library/$(1)/root/usr/lib/$(TRIPLET_$(1))

# The programs of one architecture, and the lists of their modules.
.PHONY: release-programs-amd64 release-programs-arm64
release-programs-amd64 release-programs-arm64: release-programs-%: toolchain release-version
	@$(NEED) $(TRIPLET_$*)-gcc=gcc-$(subst _,-,$(TRIPLET_$*)) /usr/include/stdlib.h=libc6-dev \
	    /usr/$(if $(filter $*,$(shell go env GOHOSTARCH)),include,$(TRIPLET_$*)/include)/stdlib.h=libc6-dev-$*-cross
	hack/c-library.sh $* $(CACHE)/c-library/$*
	GOARCH=$* CGO_ENABLED=1 CC="$(call cross,$*)" $(MAKE) --no-print-directory build BIN=$(BUILD)/release-programs/$*
	cd hack/sbom && go run . -out $(BUILD)/release-programs/$*/sbom \
	    $(addprefix $(BUILD)/release-programs/$*/,gpu-kubelet-plugin gpu-mps nvidia-cdi-hook)

# kubectl-gpu runs on users' machines: the platforms are those of hack/release/archives.go.
CLIENT_PLATFORMS := linux_amd64 linux_arm64

.PHONY: release-client
release-client: $(addprefix release-client-,$(CLIENT_PLATFORMS))

.PHONY: $(addprefix release-client-,$(CLIENT_PLATFORMS))
$(addprefix release-client-,$(CLIENT_PLATFORMS)): release-client-%: toolchain release-version
	CGO_ENABLED=0 GOOS=$(word 1,$(subst _, ,$*)) GOARCH=$(word 2,$(subst _, ,$*)) \
	    go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$(VERSION)" \
	    -o $(BUILD)/release-programs/kubectl-gpu/$*/ ./cmd/kubectl-gpu
	cd hack/sbom && go run . -out $(BUILD)/release-programs/kubectl-gpu/$*/sbom \
	    $(BUILD)/release-programs/kubectl-gpu/$*/kubectl-gpu

##@ Test

.PHONY: check
check: vet lint text helm-lint sbom reproducible ## Static checks: go vet, linters, texts, helm lint, SBOM, reproducible build

.PHONY: text
text: toolchain $(VALE) ## Check the words and width of all texts, and the sentences of the documentation
	go run ./hack/textcheck
	$(VALE) --no-global --config hack/vale/.vale.ini --output line $$(git ls-files '*.md' ':!*/testdata/*' ':!test/hardware/*/*')

.PHONY: test
test: test-unit test-faults test-sim test-e2e ## Run every test: unit, random faults, simulated GPU, real cluster

.PHONY: test-unit
test-unit: toolchain ## Unit, chart and release tools' tests, with the race detector and the coverage of pkg/
	@mkdir -p $(BUILD)
	$(GOTEST) $(AT_ONCE) -covermode=atomic -coverpkg=./pkg/... -coverprofile=$(BUILD)/pure.out $(PURE) $(LONG)
	helm=$$($(CLUSTER) program helm) && \
	HELM=$$helm $(GOTEST) $(AT_ONCE) -race -short -coverpkg=./pkg/... -coverprofile=$(BUILD)/cover.out $(UNIT) && \
	cd hack/release && go vet ./... && HELM=$$helm go test ./...
	@tail -n +2 $(BUILD)/pure.out >>$(BUILD)/cover.out
	@go tool cover -func=$(BUILD)/cover.out | awk '/^total:/ { print "coverage of pkg/ by unit tests: " $$3; exit $$3+0 < $(COVERAGE) }'

# The schedules of faults: this many seeds, from this one on. A seed always gives the same schedule.
SEED      ?= 1
SCHEDULES ?= 500
POLICIES  ?= 500

.PHONY: test-faults
test-faults: toolchain ## Random schedules of faults over the real transaction (SEED=1 SCHEDULES=500 POLICIES=500)
	$(GOTEST) ./test/schedules/mutants
	$(GOTEST) -count=1 -timeout 60m ./test/schedules -args -seed=$(SEED) -schedules=$(SCHEDULES) -policies=$(POLICIES)

# How long each fuzz target runs, and which ones (a regular expression over package.Target).
FUZZTIME ?= 60s
FUZZ     ?= .

.PHONY: fuzz
fuzz: toolchain ## Run the fuzz targets one after another (FUZZTIME=60s; FUZZ=pkg/claim for some)
	hack/fuzz.sh $(FUZZTIME) '$(FUZZ)'

.PHONY: test-faults-long
test-faults-long: toolchain ## 10,000 schedules, with every fault at every fault point 20 times, and 2,000 changes of policies (table: build/faults.md)
	@mkdir -p $(BUILD)
	go test -count=1 -timeout 120m -run '^Test(InvariantsHoldUnderFaults|PolicyChanges)' ./test/schedules -args \
	    -schedules=10000 -policies=2000 -least=20 -table=$(BUILD)/faults.md

.PHONY: test-explain-long
test-explain-long: toolchain ## kubectl gpu: each remedy on 5,000 random clusters, and a fleet of 300 nodes (ten minutes)
	go test -count=1 -run '^TestLargeFleet$$' -v ./cmd/kubectl-gpu
	go test -count=1 -timeout 120m -run '^TestRemediesMakeClaimsFit$$' -v ./cmd/kubectl-gpu/internal/explain -args -clusters=5000

# How many schedules must find a mutant. One mutant needs more than the schedules of test-faults.
MUTANT_SCHEDULES ?= 1000

.PHONY: test-mutants
test-mutants: toolchain ## Fail unless the schedules find each mutant of the code (MUTANT_SCHEDULES=1000; 12 minutes)
	go run ./test/schedules/mutants -schedules $(MUTANT_SCHEDULES)

.PHONY: test-sim
test-sim: toolchain ## The simulated GPU library with all that runs on it, and the golden outputs
	$(MAKE) --no-print-directory -C test/nvmlsim
	@$(NEED) crun || echo "crun cannot be installed: no container runs with it"
	helm=$$($(CLUSTER) program helm) && \
	HELM=$$helm $(GOTEST) -p 4 -short ./test/nvmlsim/... ./test/hwcheck/... ./test/containers/... ./test/faults/... ./test/allocation/... \
	    ./test/golden/... ./test/nvidiactk
	cd test/prometheus && go vet ./... && go test ./...

# Tests make a release of their own, so that they do not replace a signed one.
test-release test-release-e2e: RELEASE_DIR := $(BUILD)/release-test

# The simulated GPU library for arm64 has no programs of its own: nvmlsim runs on this machine.
.PHONY: test-release
test-release: release ## Make a release, run its kubectl-gpu and arm64 programs, and test signing, pushing and tampering (VERSION, REGISTRY; root)
	@$(NEED) unshare=util-linux qemu-aarch64-static=qemu-user-static
	$(MAKE) --no-print-directory -C test/nvmlsim
	$(MAKE) --no-print-directory -C test/nvmlsim library OUT=$(BUILD)/nvmlsim-arm64 CC="$(call cross,arm64)"
	helm=$$($(CLUSTER) program helm) && cd hack/release && go vet . && \
	HELM=$$helm RELEASE=$(RELEASE_DIR) SIMULATOR=$(BUILD)/nvmlsim go test -count=1 .

# The version that test-release-e2e upgrades to. Its release is made from the same source.
NEXT := v0.99.0

.PHONY: test-release-e2e
test-release-e2e: release ## Install a release by helm from a registry on a real cluster, upgrade and go back, refuse tampered ones (VERSION, REGISTRY; root)
	$(MAKE) --no-print-directory release VERSION=$(NEXT) RELEASE_DIR=$(BUILD)/release-next
	RELEASE=$(RELEASE_DIR) NEXT_RELEASE=$(BUILD)/release-next $(GOTEST) -v -count=1 -timeout 30m ./test/e2e/... -run 'TestReleaseInstallsFromARegistry$$'

.PHONY: golden
golden: toolchain ## Rewrite the golden outputs in test/golden/testdata, the models of kubectl gpu and docs/cdi.md; git diff shows what changed
	helm=$$($(CLUSTER) program helm) && HELM=$$helm go test -count=1 ./test/golden ./cmd/kubectl-gpu/internal/slices -args -update
	go test -count=1 -run Documented ./test/nvidiactk -args -update

# Programs to measure, alternating. The default is the one of this checkout. To compare:
# PROGRAMS=before=/tmp/old,after=build/bin/gpu-kubelet-plugin
PROGRAMS ?= $(BUILD)/bin/gpu-kubelet-plugin
BENCH := go run ./test/bench/cmd/bench -programs $(PROGRAMS) -json $(BUILD)/bench.json

# Coverage counters of all rooms, cleared before the call. Those of child processes are not read.
.PHONY: prepare-path
prepare-path: toolchain ## List the functions that run during one Prepare of a whole GPU (root; PATH_ARGS="-functions 40 -files 20")
	@mkdir -p $(BUILD)/children
	GOCOVERDIR=$(BUILD)/children go run -cover -covermode=atomic -coverpkg=./pkg/...,./test/bench/cmd/preparepath \
	    ./test/bench/cmd/preparepath $(PATH_ARGS)
	@rm -rf $(BUILD)/children

.PHONY: bench
bench: build ## Measure the plugin's cost against the minimum for durable writes, on an idle machine (root; BENCH_ARGS="-only single")
	$(BENCH) $(BENCH_ARGS)

.PHONY: bench-quick
bench-quick: build
	$(BENCH) -quick $(BENCH_ARGS)

.PHONY: bench-scale
bench-scale: build ## Measure schedulers with our slices of 500 nodes, on an idle machine (root; SCALE_ARGS="-kubernetes v1.37.2")
	go run ./test/bench/cmd/scale -program $(BUILD)/bin/gpu-kubelet-plugin -json $(BUILD)/scale.json $(SCALE_ARGS)

# Runs of each benchmark: benchstat needs ten to distinguish a change from noise.
COUNT ?= 10

.PHONY: bench-go
bench-go: toolchain ## Run the Go benchmarks, into build/bench-go.txt for benchstat (COUNT=10)
	@mkdir -p $(BUILD)
	go test -run '^$$' -bench . -count $(COUNT) $(PURE) ./pkg/checkpoint ./pkg/cdi | tee $(BUILD)/bench-go.txt

.PHONY: bench-pods
bench-pods: toolchain ## Measure how much a GPU claim delays a Pod, on a real cluster on an idle machine (root; PODS_ARGS="-pods 20")
	@mkdir -p $(BUILD)
	go run ./test/bench/cmd/pods -json $(BUILD)/pods.json $(PODS_ARGS)

.PHONY: bench-limits
bench-limits: toolchain ## Hold the cost of many simultaneous partition claims to limits, on an idle machine (root)
	$(GOTEST) -v -count=1 ./test/bench

# Parallel suites on clusters. Each takes about a minute of processor time, in two to four minutes.
SUITES ?= 4

.PHONY: test-e2e
test-e2e: toolchain ## The chart, the image and the plugin on a real cluster with simulated GPUs (root)
	go test -count=1 -timeout 20m -tags cluster ./test/cluster
	$(MAKE) --no-print-directory bench-quick
	$(GOTEST) -v -count=1 -short -parallel $(SUITES) -timeout 60m ./test/e2e/...

.PHONY: test-long
test-long: toolchain ## All suites with their long parts, three on an awkward node, and explain against the running scheduler (root)
	$(MAKE) --no-print-directory -C test/nvmlsim
	@$(NEED) crun || echo "crun cannot be installed: no container runs with it"
	$(GOTEST) ./test/allocation ./test/nvidiactk
	$(GOTEST) -timeout 20m ./test/containers
	$(GOTEST) -v -count=1 -parallel $(SUITES) -timeout 90m ./test/e2e/...
	go test -tags cluster -count=1 -v -timeout 30m -run '^TestVerdictIsThatOfTheScheduler$$' ./cmd/kubectl-gpu/internal/explain -args -clusters=200
	$(GOTEST) -v -count=1 -parallel $(SUITES) -timeout 90m ./test/e2e/... -run 'Test(MIG|Sharing|Health)$$' -args -node=awkward

# Lines of Kubernetes and containerd (test/cluster/versions.go), and the suites to run there.
# UPDATE=1 writes what TestVersion finds, for make reference.
K8S        ?=
CONTAINERD ?=
RUN        ?= .

.PHONY: test-matrix
test-matrix: toolchain ## The suites on other versions of Kubernetes and containerd (root; K8S=1.37 CONTAINERD=1.7 RUN=TestVersion UPDATE=1)
	E2E_KUBERNETES=$(K8S) E2E_CONTAINERD=$(CONTAINERD) \
	    $(GOTEST) -v -count=1 -parallel $(SUITES) -timeout 90m ./test/e2e/... -run '$(RUN)' $(if $(UPDATE),-args -update)

# The number of Pods, and the seconds between kills of the plugin and the kubelet.
SOAK := SOAK_PODS=2000 SOAK_KILL_PLUGIN=20 SOAK_KILL_KUBELET=120

.PHONY: soak
soak: toolchain ## Run thousands of Pods while plugin and kubelet are killed; half an hour (root; SOAK="SOAK_PODS=10000 …")
	$(SOAK) $(GOTEST) -v -count=1 -timeout 12h ./test/e2e/... -run 'TestSoak$$'

# The root of NVIDIA's driver on this machine.
DRIVER_ROOT ?= /

.PHONY: test-gpu
test-gpu: toolchain ## The chart and Pods with claims on this machine's own GPUs, of which it changes none (root; DRIVER_ROOT=/)
	E2E_DRIVER_ROOT=$(DRIVER_ROOT) $(GOTEST) -v -count=1 -timeout 30m ./test/e2e/... -run 'TestRealGPU$$'

.PHONY: hwcheck
hwcheck: toolchain ## Build build/hwcheck, a folder that checks a real GPU without Go or network, and only reads
	hack/hwcheck.sh $(BUILD)/hwcheck

##@ Demo

.PHONY: demo
demo: toolchain ## Start a cluster with a simulated 8-GPU node, and a Pod with a claim that runs nvidia-smi (root)
	@mkdir -p $(BUILD)/bin
	go build -o $(BUILD)/bin/demo ./hack/demo
	$(BUILD)/bin/demo up

.PHONY: demo-down
demo-down: toolchain ## Remove the demo's cluster; build/ and the caches stay
	go run ./hack/demo down

.PHONY: reference
reference: ## Rewrite the tables of docs/reference.md, and the chart's rules for configurations
	go run ./hack/reference
	go run ./hack/parameterpolicy

.PHONY: clean
clean: ## Remove build/; the caches below ~/.cache/gpu-dra-driver stay
	rm -rf $(BUILD)

# --- parts of the above ---

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

$(LINT):
	@echo "building golangci-lint: a minute or two, once"
	@mkdir -p $(@D)
	cd hack/tools && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o $@.tmp \
	    github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@mv $@.tmp $@

$(VALE):
	@echo "building vale: two minutes, once"
	@mkdir -p $(@D)
	cd hack/vale && CGO_CFLAGS="-O2 -w" go build -trimpath -ldflags "-s -w" -o $@.tmp github.com/vale-cli/vale/v3/cmd/vale
	@mv $@.tmp $@

# helm comes from the test cluster's programs, in the tests' version.
.PHONY: helm-lint
helm-lint: toolchain
	@helm=$$($(CLUSTER) program helm) && \
	$$helm lint --strict deployments/helm/gpu-dra-driver && \
	$$helm lint --strict deployments/helm/gpu-dra-driver --values test/e2e/values.yaml
