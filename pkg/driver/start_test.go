package driver

import (
	"context"
	"net"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/preparetest"
)

// stalledServer returns a client of a fake API server that accepts connections and never answers.
func stalledServer(t *testing.T) kubernetes.Interface {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://" + listener.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func TestUnprepareIsServedWhileAPIServerStalls(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start(t)
	n.register(t)
	held := n.claim(t, "held", firstGPU)
	eventually(t, "a claim is prepared", func() bool { return n.prepare(t, held).GetError() == "" })
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}

	n.cfg.DaemonSetName = "" // so that the plugin does not look up the DaemonSet when it stops
	client := stalledServer(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	began := time.Now()
	go func() {
		d, err := New(ctx, n.cfg, Parts{
			Client: client, StatusClient: client, Hardware: n.hardware(),
			Partitions: preparetest.NoPartitions{}, Metrics: metrics.New("test"),
			Watch: watchNothing, StopWorkers: noWorkers,
		})
		if err == nil {
			err = d.Run(ctx, n.probe)
		}
		done <- err
	}()
	eventually(t, "the plugin serves its sockets", n.serves)
	if msg := n.unprepare(t, held); msg != "" {
		t.Error(msg)
	}
	if took, most := time.Since(began), firstScanTimeout+5*time.Second; took > most {
		t.Errorf("the claim was unprepared after %s, later than %s", took, most)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
