package publish

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fakeapi"
)

// lockedGPU acts as claims whose GPU's lock is held until the time free.
type lockedGPU struct {
	*fakeRecords
	free  time.Time
	waits atomic.Int64
}

func (l *lockedGPU) ForeignInstances(ctx context.Context, c device.Card, gpu string) (instances, foreign []device.Instance, err error) {
	if wait := time.Until(l.free); wait > 0 {
		l.waits.Add(1)
		select {
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		case <-time.After(wait):
		}
	}
	return l.fakeRecords.ForeignInstances(ctx, c, gpu)
}

// A build of the slices may wait for a GPU's lock. The taint of an XID must not wait for the build.
func TestTaintIsNotDelayedByLockedGPU(t *testing.T) {
	for name, held := range map[string]bool{"nothing is built": false, "the GPU is locked": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := fakeapi.New()
				u := newPublishingNode(t, client, halvesWith())
				gpu := &lockedGPU{fakeRecords: &fakeRecords{onCard: []device.Instance{instance(1, 0)}}}
				u.publisher.opts.Claims, u.publisher.layouts.ownership = gpu, gpu
				policies, err := settings.ParseMIG("dynamic")
				if err != nil {
					t.Fatal(err)
				}
				u.node.SetNodePolicies(policies)
				u.run(t, u.publisher.publish)
				advance(2 * time.Minute)
				var tainted time.Time
				fakeapi.Prepend(client, "*", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
					written, ok := a.(interface{ GetObject() runtime.Object })
					if !ok || !tainted.IsZero() {
						return false, nil, nil
					}
					for _, d := range written.GetObject().(*resourceapi.ResourceSlice).Spec.Devices {
						if len(d.Taints) > 0 {
							tainted = time.Now()
						}
					}
					return false, nil, nil
				})

				if held {
					// An admin has partitioned the GPU. To know that, the build asks the GPU under its lock.
					gpu.free = time.Now().Add(5 * time.Second)
					u.setInventory(halvesWith(instance(1, 0)))
					advance(time.Second)
					if gpu.waits.Load() != 1 {
						t.Fatal("the build does not wait for the lock")
					}
				}
				began := time.Now()
				u.setXIDs(t, 79)
				advance(time.Minute)
				if took := tainted.Sub(began); tainted.IsZero() || took > 50*time.Millisecond {
					t.Errorf("the taint took %s", took)
				}
				if u.taints(t) == 0 {
					t.Error("no taint is published")
				}
				if got := fakeapi.Devices(t, client); held && !slices.Equal(got, []string{firstGPU + "-mig-9-0"}) {
					t.Errorf("after the lock was free: %v", got)
				}
				u.stop()
			})
		})
	}
}
