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
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen for probes and metrics (--http-address): %w", err)
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			failed(fmt.Errorf("serve probes and metrics (--http-address): %w", err))
		}
	}()
	klog.FromContext(ctx).Info("Serving probes and metrics", "address", listener.Addr().String())
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
