package driver

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
)

// freeAddress returns an address on loopback with a free port.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	r, err := http.Get(url) //nolint:noctx // a loopback address of this test
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(body)
}

func TestProbesOverHTTP(t *testing.T) {
	probe := NewProbe()
	address := freeAddress(t)
	failed := func(err error) { t.Errorf("stopped early: %v", err) }
	if err := ServeHTTP(t.Context(), address, probe, metrics.New("v1.2.3").Registry, failed); err != nil {
		t.Fatal(err)
	}
	if code, _ := get(t, "http://"+address+"/livez"); code != http.StatusOK {
		t.Errorf("liveness of a starting plugin: got %d", code)
	}
	code, body := get(t, "http://"+address+"/readyz")
	if code != http.StatusServiceUnavailable || !strings.Contains(body, "starting") {
		t.Errorf("readiness of a starting plugin: got %d, %q", code, body)
	}
	probe.Set(func(context.Context) error { return nil }, func(context.Context) error { return nil })
	if code, _ := get(t, "http://"+address+"/readyz"); code != http.StatusOK {
		t.Errorf("ready: got %d", code)
	}
	_, body = get(t, "http://"+address+"/metrics")
	if !strings.Contains(body, `gpu_dra_build_info{go_version=`) || !strings.Contains(body, `version="v1.2.3"`) {
		t.Error("the metrics do not say which build runs")
	}
	err := ServeHTTP(t.Context(), address, probe, metrics.New("").Registry, failed)
	if err == nil || !strings.Contains(err.Error(), "--http-address") {
		t.Errorf("a taken port: %v", err)
	}
}
