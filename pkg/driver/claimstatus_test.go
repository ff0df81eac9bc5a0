package driver

import (
	"context"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/preparetest"
)

// The status of a claim that is released before its status was written must not be written. Its
// next Pod may prepare it again, and then its status is written.
func TestReleasedClaimGetsNoStatus(t *testing.T) {
	n := newNode(t)
	d, err := New(t.Context(), n.cfg, Parts{
		Client: n.client, StatusClient: n.client, Hardware: n.hardware(),
		Partitions: preparetest.NoPartitions{}, Metrics: metrics.New("test"),
		Watch: watchNothing, StopWorkers: noWorkers,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer d.cleaner.Release()
	prepare := func(name string) {
		record := checkpoint.Record{ClaimUID: types.UID("uid-" + name), Namespace: "team", Name: name, State: checkpoint.Prepared}
		record.Devices = make([]checkpoint.Device, 1)
		record.Devices[0].Device, record.Devices[0].GPU = firstGPU, firstGPU
		if err := d.preparer.Records.Save(record); err != nil {
			t.Fatal(err)
		}
		d.status.Prepared(n.newClaim(t, name))
	}
	for name, release := range map[string]func(uid types.UID) error{
		"unprepared": func(uid types.UID) error { return d.preparer.Unprepare(t.Context(), uid) },
		"orphaned": func(uid types.UID) error {
			_, err := d.preparer.UnprepareOrphan(t.Context(), uid, func(context.Context, checkpoint.Record) error { return nil })
			return err
		},
	} {
		prepare(name)
		if err := release(types.UID("uid-" + name)); err != nil {
			t.Fatal(err)
		}
	}
	prepare("kept")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); d.status.Run(ctx, d.preparer) }()
	defer func() { cancel(); <-done }()
	eventually(t, "the last write is made", func() bool { return len(n.getClaim(t, "kept").Status.Devices) == 1 })
	for _, name := range []string{"unprepared", "orphaned"} {
		if written := n.getClaim(t, name).Status.Devices; len(written) > 0 {
			t.Errorf("the status of claim %s was written: %v", name, written)
		}
	}
}

// newClaim creates a claim that has the first GPU.
func (n *node) newClaim(t *testing.T, name string) *resourceapi.ResourceClaim {
	t.Helper()
	n.claim(t, name, firstGPU)
	return n.getClaim(t, name)
}

func (n *node) getClaim(t *testing.T, name string) *resourceapi.ResourceClaim {
	t.Helper()
	c, err := n.client.ResourceV1().ResourceClaims("team").Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestDisabledStatusIsNotWritten(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.cfg.ClaimStatus = false
	n.start(t)
	n.register(t)
	eventually(t, "both GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	c := n.claim(t, "c", firstGPU)
	n.client.ClearActions()
	if answer := n.prepare(t, c); answer.GetError() != "" {
		t.Fatal(answer.GetError())
	}
	<-time.After(500 * time.Millisecond) // within this time a writer that is not switched off writes
	if msg := n.unprepare(t, c); msg != "" {
		t.Fatal(msg)
	}
	for _, a := range n.client.Actions() {
		if a.GetResource().Resource == "resourceclaims" && a.GetVerb() != "get" {
			t.Errorf("%s %s/%s", a.GetVerb(), a.GetResource().Resource, a.GetSubresource())
		}
	}
}
