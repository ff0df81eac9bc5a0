package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
)

// Probe has two functions: one returns nil if the process is live, the other if it is ready.
// Otherwise they return an error with the reason.
type Probe struct {
	live  atomic.Pointer[func(context.Context) error]
	ready atomic.Pointer[func(context.Context) error]
}

// NewProbe returns a Probe for a starting process: live, but not ready.
func NewProbe() *Probe {
	p := &Probe{}
	p.Set(func(context.Context) error { return nil }, func(context.Context) error { return errors.New("starting") })
	return p
}

// Set replaces both functions.
func (p *Probe) Set(live, ready func(context.Context) error) {
	p.live.Store(&live)
	p.ready.Store(&ready)
}

func (p *Probe) isLive(ctx context.Context) error  { return (*p.live.Load())(ctx) }
func (p *Probe) isReady(ctx context.Context) error { return (*p.ready.Load())(ctx) }

// ServeHTTP serves /livez, /readyz and /metrics on address until the context ends. It returns as
// soon as it listens on address. It calls failed if serving fails later.
func ServeHTTP(
	ctx context.Context, address string, probe *Probe, gatherer prometheus.Gatherer, failed func(error),
) error {
	if address == "" {
		return nil
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{}))
	mux.Handle("/livez", probeHandler(probe.isLive))
	mux.Handle("/readyz", probeHandler(probe.isReady))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	return serveOn(ctx, address, "probes and metrics (--http-address)", server.Serve, failed)
}

// serveOn listens on address and serves what until the server is closed. It calls failed if serving
// fails.
func serveOn(ctx context.Context, address, what string, serve func(net.Listener) error, failed func(error)) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen for %s: %w", what, err)
	}
	go func() {
		if err := serve(listener); err != nil && !errors.Is(err, http.ErrServerClosed) {
			failed(fmt.Errorf("serve %s: %w", what, err))
		}
	}()
	klog.FromContext(ctx).Info("Serving "+what, "address", listener.Addr().String())
	return nil
}

func probeHandler(check func(context.Context) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := check(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	})
}

// ServeGRPCHealth serves grpc.health.v1 on address until the context ends. The services "" and
// "readiness" report readiness, the service "liveness" reports liveness. It calls failed if serving
// fails later.
func ServeGRPCHealth(ctx context.Context, address string, probe *Probe, failed func(error)) error {
	if address == "" {
		return nil
	}
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, &grpcHealth{probe: probe})
	context.AfterFunc(ctx, server.Stop)
	return serveOn(ctx, address, "the gRPC health service (--grpc-health-address)", server.Serve, failed)
}

type grpcHealth struct {
	healthpb.UnimplementedHealthServer
	probe *Probe
}

func (h *grpcHealth) Check(ctx context.Context, req *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	var serving bool
	switch req.GetService() {
	case "", "readiness":
		serving = h.probe.isReady(ctx) == nil
	case "liveness":
		serving = h.probe.isLive(ctx) == nil
	default:
		return nil, status.Errorf(codes.NotFound, "service %q: want \"\", readiness or liveness", req.GetService())
	}
	answer := healthpb.HealthCheckResponse_NOT_SERVING
	if serving {
		answer = healthpb.HealthCheckResponse_SERVING
	}
	return &healthpb.HealthCheckResponse{Status: answer}, nil
}
