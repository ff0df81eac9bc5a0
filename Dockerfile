# Builds with docker, podman and buildah alike:
#   docker build --build-arg VERSION=0.1.0 -t gpu-dra-driver:0.1.0 .

# An image with Go (at least the version of go.mod), a C compiler, glibc and its static library.
ARG BUILDER=golang:1.26-bookworm

FROM ${BUILDER} AS build
# Go's own settings, for a proxy or a mounted cache. Without them Go's defaults apply.
ARG GOPROXY
ARG GOFLAGS
ARG GOMODCACHE
ARG GOCACHE
ENV PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    GOTOOLCHAIN=local \
    CGO_ENABLED=1 \
    CGO_CFLAGS="-O2 -Wno-deprecated-declarations"
WORKDIR /src
# A separate layer: a change of the source alone downloads nothing.
COPY go.mod go.sum ./
RUN go mod download
# The hook runs on the host, whose glibc may be older or missing. So it is linked statically. The
# linker warns of dlopen: only the hook's NVML commands need it, and our specs do not call those.
RUN go build -trimpath -buildvcs=false -tags netgo,osusergo -ldflags "-s -w -extldflags=-static" \
    -o /out/nvidia-cdi-hook github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook
COPY api api
COPY cmd cmd
COPY pkg pkg
ARG VERSION=devel
# -trimpath and -buildvcs=false: with the same toolchain and base images, the same source makes the
# same bytes in every folder.
# grpcnotrace: gRPC's trace pages import html/template, which finds methods by name. The linker
# would keep every method of every Kubernetes API: 70 MB instead of 41.
# Never -z now: NVML's symbols are bound lazily, and an older driver may lack one.
RUN go build -tags grpcnotrace -trimpath -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" \
    -o /out/gpu-kubelet-plugin ./cmd/gpu-kubelet-plugin
# It also runs on the host, as a hook: static, without a C library.
RUN CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" -o /out/gpu-mps ./cmd/gpu-mps
# The plugin needs the C library that it is linked against, and the parts that NVIDIA's library may
# load. /tmp is for the MPS daemons' file systems, since a container's root is read-only.
RUN set -e; linked=$(ldd /out/gpu-kubelet-plugin | grep -o '/[^ ]*'); \
    libraries=$(dirname "$(echo "$linked" | grep 'libc\.so')"); \
    mkdir -p /out/root/tmp; cp -L --parents $linked "$libraries/libm.so.6" "$libraries/libdl.so.2" \
        "$libraries/libpthread.so.0" "$libraries/librt.so.1" /out/root

# No shell, no package, no account: nothing that an attacker could use.
FROM scratch
COPY --from=build /out/root /
COPY --from=build /out/gpu-kubelet-plugin /out/gpu-mps /out/nvidia-cdi-hook /usr/bin/
COPY LICENSE /usr/share/doc/gpu-dra-driver/LICENSE
ENTRYPOINT ["/usr/bin/gpu-kubelet-plugin"]
