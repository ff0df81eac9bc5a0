package driver

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

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

func TestProbesOverGRPC(t *testing.T) {
	probe := NewProbe()
	address := freeAddress(t)
	if err := ServeGRPCHealth(t.Context(), address, probe, func(err error) { t.Errorf("stopped early: %v", err) }); err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	check := func(service string) healthpb.HealthCheckResponse_ServingStatus {
		answer, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
		if err != nil {
			t.Fatal(err)
		}
		return answer.GetStatus()
	}
	probe.Set(func(context.Context) error { return nil }, func(context.Context) error { return errors.New("no driver") })
	if check("liveness") != healthpb.HealthCheckResponse_SERVING || check("readiness") != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Error("want live and not ready")
	}
	_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: "other"})
	if status.Code(err) != codes.NotFound {
		t.Errorf("an unknown service: %v", err)
	}
}
