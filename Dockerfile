# Builds with docker, podman and buildah alike:
#   docker build --build-arg VERSION=0.1.0 -t gpu-dra-driver:0.1.0 .

# An image with Go (the version that go.mod names or later), a C compiler and glibc with its static library.
ARG BUILDER=golang:1.26-bookworm

FROM ${BUILDER} AS build
# Go's own settings may be given as build arguments, for a proxy or a mounted cache; without them its defaults hold.
ARG GOPROXY
ARG GOFLAGS
ARG GOMODCACHE
ARG GOCACHE
ENV PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    GOTOOLCHAIN=local \
    CGO_ENABLED=1 \
    CGO_CFLAGS="-O2 -Wno-deprecated-declarations"
WORKDIR /src
# A layer of its own: a change of the source alone downloads nothing.
COPY go.mod go.sum ./
RUN go mod download
# The hook runs on the host, whose glibc may be older than the builder's or none at all: linked statically, it asks for neither.
# (The linker warns of dlopen: only the hook's commands that ask NVML would need it, and no spec of ours calls those.)
RUN go build -trimpath -buildvcs=false -tags netgo,osusergo -ldflags "-s -w -extldflags=-static" \
    -o /out/nvidia-cdi-hook github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook
COPY api api
COPY cmd cmd
COPY pkg pkg
ARG VERSION=devel
# -trimpath and -buildvcs=false: with the same toolchain and the same base images the same source makes the same bytes, in whatever folder it is built.
# grpcnotrace: gRPC's trace pages bring html/template along, which finds methods by name, so that the linker would keep every method of every Kubernetes
# API: 70 MB instead of 41.
# Never with -z now: NVML's symbols are bound lazily, and one that an older driver lacks must not keep the plugin from starting.
RUN go build -tags grpcnotrace -trimpath -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" -o /out/gpu-kubelet-plugin ./cmd/gpu-kubelet-plugin
# It runs on the host too, as a hook: static, without a C library.
RUN CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" -o /out/gpu-mps ./cmd/gpu-mps
# The C library that the plugin is linked against, and the parts of it that NVIDIA's may ask for: all of the builder's image that the plugin needs. And a place
# for the MPS daemons' file systems, since a container's root is read-only.
RUN set -e; linked=$(ldd /out/gpu-kubelet-plugin | grep -o '/[^ ]*'); \
    beside=$(dirname "$(echo "$linked" | grep 'libc\.so')"); \
    mkdir -p /out/root/tmp; cp -L --parents $linked "$beside/libm.so.6" "$beside/libdl.so.2" "$beside/libpthread.so.0" "$beside/librt.so.1" /out/root

# No shell, no package, no account: nothing that somebody who got in could use.
FROM scratch
COPY --from=build /out/root /
COPY --from=build /out/gpu-kubelet-plugin /out/gpu-mps /out/nvidia-cdi-hook /usr/bin/
COPY LICENSE /usr/share/doc/gpu-dra-driver/LICENSE
ENTRYPOINT ["/usr/bin/gpu-kubelet-plugin"]
