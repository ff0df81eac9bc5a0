// These helpers build the claims of the tests, prepare them and unprepare them.

package prepare_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

type result = resourceapi.DeviceRequestAllocationResult

func allocated(request, name string) result {
	return result{Request: request, Driver: driverName, Pool: pool, Device: name}
}

func admin(request, name string) result {
	r := allocated(request, name)
	r.AdminAccess = ptr.To(true)
	return r
}

func newClaim(name string, results ...result) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation:  &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-" + name, UID: types.UID("pod-" + name)}},
		},
	}
}

func configured(c *resourceapi.ResourceClaim, parameters string) *resourceapi.ResourceClaim {
	c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
		}},
	})
	return c
}

// forPods makes the claim reserved for exactly these Pods.
func forPods(c *resourceapi.ResourceClaim, pods ...string) *resourceapi.ResourceClaim {
	c.Status.ReservedFor = nil
	for _, pod := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod,
			UID: types.UID(pod)})
	}
	return c
}

const (
	small0   = gpu0 + "-mig-19-0" // 1g.10gb at 0
	small1   = gpu0 + "-mig-19-1"
	large4   = gpu0 + "-mig-9-4" // 3g.40gb at 4
	large0   = gpu0 + "-mig-9-0"
	neighbor = gpu1 + "-mig-19-6"
	nothing  = ""
)

const (
	share0    = gpu0 + "-share"
	share1    = gpu1 + "-share"
	migShare0 = small0 + "-share"
)

// fraction returns an allocated share with this much memory and this percentage of the cores.
func fraction(request, name, memory, cores string) result {
	r := shareOf(request, name)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory),
		"cores": resource.MustParse(cores)}
	return r
}

// plain returns an allocated plain share, which has no limits.
func plain(request, name string) result {
	r := shareOf(request, name)
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("1")}
	return r
}

func shareOf(request, name string) result {
	r := allocated(request, name)
	r.ShareID = ptr.To(types.UID("share-" + request))
	return r
}

// shareBy adds a configuration of this kind to the claim, with these sharing settings. It applies
// to all requests.
func shareBy(c *resourceapi.ResourceClaim, kind, sharing string) *resourceapi.ResourceClaim {
	return configured(c, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"`+kind+`","sharing":`+sharing+`}`)
}

// shareEach adds one configuration for each request, all with the same sharing settings.
func shareEach(c *resourceapi.ResourceClaim, kind, sharing string) *resourceapi.ResourceClaim {
	for _, r := range c.Status.Allocation.Devices.Results {
		shareBy(c, kind, sharing)
		all := c.Status.Allocation.Devices.Config
		all[len(all)-1].Requests = []string{r.Request}
	}
	return c
}

func slicing(interval string) string {
	return `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"` + interval + `"}}`
}

const byMPS = `{"strategy":"MPS"}`

var several = newClaim("c", allocated("a", small0), allocated("b", neighbor))

var (
	sliced   = shareBy(newClaim("c", allocated("r", gpu0)), "GpuConfig", slicing("Long"))
	grouped  = shareBy(newClaim("c", allocated("a", gpu0), allocated("b", gpu1)), "GpuConfig", byMPS)
	parted   = shareEach(newClaim("c", allocated("a", small0), allocated("b", neighbor)), "MigDeviceConfig", byMPS)
	part1    = newClaim("c", fraction("r", share0, "10Gi", "30"))
	part2    = newClaim("d", fraction("r", share0, "10Gi", "30"))
	migPart1 = newClaim("c", fraction("r", migShare0, "2Gi", "0"))
	migPart2 = newClaim("d", fraction("r", migShare0, "2Gi", "0"))
	long1    = shareBy(newClaim("c", plain("r", share0)), "GpuConfig", slicing("Long"))
	long2    = shareBy(newClaim("d", plain("r", share0), plain("s", share1)), "GpuConfig", slicing("Long"))
	moved    = newClaim("c", fraction("r", share1, "10Gi", "30"))
)

func mustPrepare(t *testing.T, p *plugin, c *resourceapi.ResourceClaim) []kubeletplugin.Device {
	t.Helper()
	devices, err := p.Prepare(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return devices
}

// reconcileUnreadable fails the test unless Reconcile reports an unreadable record.
func reconcileUnreadable(t *testing.T, p *plugin) {
	t.Helper()
	if err := p.Reconcile(t.Context()); cause.Of(err) != cause.Record || !strings.Contains(err.Error(), "until it is unprepared") {
		t.Fatal(err)
	}
}

// mustPrepareLarge prepares a claim for so many partitions, six on each GPU, that its record's file
// name does not list them.
func mustPrepareLarge(t *testing.T, w *world, p *plugin) {
	t.Helper()
	var results []result
	for _, gpu := range []string{gpu0, gpu1} {
		for start := range 6 {
			results = append(results, allocated(fmt.Sprint(gpu, start), fmt.Sprintf("%s-mig-19-%d", gpu, start)))
		}
	}
	mustPrepare(t, p, newClaim("large", results...))
	if r := w.records(); len(r) != 1 || r[0] != "uid-large_all.json" {
		t.Fatalf("the records are %q", r)
	}
}

func mustUnprepare(t *testing.T, p *plugin, uid types.UID) {
	t.Helper()
	if err := p.Unprepare(t.Context(), uid); err != nil {
		t.Fatal(err)
	}
}

func confirmAlways(context.Context, checkpoint.Record) error { return nil }
