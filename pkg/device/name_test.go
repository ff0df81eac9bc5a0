package device

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
)

func TestNameRoundTrip(t *testing.T) {
	for _, n := range []Name{
		{GPU: "gpu-0000-1b-00-0"},
		{GPU: "gpu-10000-e1-1f-7"},
		{GPU: "gpu-0000-1b-00-0", Partition: &PartitionName{}},
		{GPU: "gpu-0000-1b-00-0", Partition: &PartitionName{ProfileID: 19, Start: 6}},
		{GPU: "gpu-0000-1b-00-0", Partition: &PartitionName{ProfileID: 9, Start: 4, Compute: ptr.To(uint32(0))}},
		{GPU: "gpu-0000-1b-00-0", Passthrough: true},
		{GPU: "gpu-0000-1b-00-0", Share: true},
		{GPU: "gpu-ffffffff-ff-1f-7", Share: true},
		{GPU: "gpu-0000-1b-00-0", Partition: &PartitionName{ProfileID: 19, Start: 3}, Share: true},
		{GPU: "gpu-ffffffff-ff-1f-7", Partition: &PartitionName{ProfileID: 999, Start: 31, Compute: ptr.To(uint32(7))}, Share: true},
		{GPU: "gpu-ffffffff-ff-1f-7", Partition: &PartitionName{ProfileID: 1<<32 - 1, Start: 1<<32 - 1, Compute: ptr.To[uint32](1<<32 - 1)}},
	} {
		s := n.String()
		got, ok := ParseName(s)
		if !ok || got.String() != s || got.GPU != n.GPU || got.Share != n.Share || got.Passthrough != n.Passthrough ||
			(got.Partition == nil) != (n.Partition == nil) {
			t.Errorf("%s is parsed as %+v, %v", s, got, ok)
		}
		if p := n.Partition; p != nil && (got.Partition.ProfileID != p.ProfileID || got.Partition.Start != p.Start ||
			(got.Partition.Compute == nil) != (p.Compute == nil)) {
			t.Errorf("%s is parsed as %+v", s, *got.Partition)
		}
		if msgs := validation.IsDNS1123Label(s); len(msgs) > 0 {
			t.Errorf("%s: %v", s, msgs)
		}
	}
	part := Name{GPU: "gpu-0000-1b-00-0", Partition: &PartitionName{ProfileID: 9, Start: 4, Compute: ptr.To(uint32(1))}}
	share := part
	share.Share = true
	for n, want := range map[*Name]string{
		&part:                                  "gpu-0000-1b-00-0-mig-9-4-ci-1",
		&share:                                 "gpu-0000-1b-00-0-mig-9-4-ci-1-share",
		{GPU: "gpu-0000-1b-00-0", Share: true}: "gpu-0000-1b-00-0-share",
		{GPU: "gpu-0000-1b-00-0", Passthrough: true}: "gpu-0000-1b-00-0-vfio",
	} {
		if s := n.String(); s != want {
			t.Errorf("%s, want %s", s, want)
		}
	}
	if share.Unshared() != part || part.Unshared() != part {
		t.Errorf("%s is a share of %s", share, share.Unshared())
	}
}

// DeviceNames must list every device that the GPU can be offered as, because the plugin reports the
// health of these devices to the kubelet.
func TestDeviceNamesListsEveryPossibleDevice(t *testing.T) {
	g := GPU{PCIAddress: "0000:1b:00.0"}
	if diff := cmp.Diff([]string{wholeName, wholeName + "-share"}, g.DeviceNames()); diff != "" {
		t.Error(diff)
	}
	g.Passthrough = &Passthrough{}
	if !slices.Contains(g.DeviceNames(), vfioName) || !g.Has(Name{GPU: wholeName, Passthrough: true}) {
		t.Errorf("a GPU for virtual machines has %v", g.DeviceNames())
	}
	g = small()
	if g.Has(Name{GPU: wholeName, Passthrough: true}) {
		t.Error("a GPU that cannot be passed to virtual machines has a device for them")
	}
	names := sets.New(g.DeviceNames()...)
	if names.Len() != len(g.DeviceNames()) {
		t.Errorf("a name occurs twice: %v", g.DeviceNames())
	}
	for _, n := range []string{wholeName, firstName, lastName, twoName} {
		if !names.HasAll(n, n+"-share") {
			t.Errorf("%s or its share is missing from %v", n, names.UnsortedList())
		}
	}
	for n := range names {
		if got, ok := ParseName(n); !ok || got.GPU != wholeName {
			t.Errorf("%s is parsed as %+v, %v", n, got, ok)
		}
	}
}

func TestParseNameRejectsForeignNames(t *testing.T) {
	for _, s := range []string{
		"", "gpu-0", "gpu-000-1b-00-0", "gpu-0000-1b-00-8", "gpu-0000-1B-00-0", "xgpu-0000-1b-00-0", "gpu-0000-1b-00-0\n",
		"gpu-0000-1b-00-0-", "gpu-0000-1b-00-0-mig", "gpu-0000-1b-00-0-mig-19", "gpu-0000-1b-00-0-mig-19-", "gpu-0000-1b-00-0-mig-019-0",
		"gpu-0000-1b-00-0-mig-19-00", "gpu-0000-1b-00-0-mig-19-4294967296", "gpu-0000-1b-00-0-mig--1-0", "gpu-0000-1b-00-0-mig-19-0-ci",
		"gpu-0000-1b-00-0-mig-19-0-ci-", "gpu-0000-1b-00-0-mig-19-0-ci-01", "gpu-0000-1b-00-0-ci-1", "gpu-0000-1b-00-0-mig-19-0-mig-19-0",
		"gpu-0000-1b-00-0-shared", "gpu-0000-1b-00-0-share-share", "-share", "gpu-0000-1b-00-0-share-mig-19-0", "gpu-0000-1b-00-0-mig-19-share",
		"gpu-0000-1b-00-0-vfio-share", "gpu-0000-1b-00-0-share-vfio", "gpu-0000-1b-00-0-mig-19-0-vfio", "gpu-0000-1b-00-0-vfio-mig-19-0",
		// These names are too long for a DNS label or have a leading zero.
		"gpu-0000-1b-00-0-mig-019-0-share", "gpu-ffffffff-ff-1f-7-mig-4294967295-4294967295-ci-4294967295-share",
		"gpu-0000-1b-00-0-mig-" + strings.Repeat("9", 100) + "-0",
	} {
		if n, ok := ParseName(s); ok {
			t.Errorf("%q is parsed as %s", s, n)
		}
	}
}

func FuzzParseName(f *testing.F) {
	f.Add("gpu-0000-1b-00-0-mig-9-4-ci-1")
	f.Fuzz(func(t *testing.T, s string) {
		if n, ok := ParseName(s); ok && n.String() != s {
			t.Errorf("%q is parsed as %s", s, n)
		}
	})
}

func TestConflict(t *testing.T) {
	const other = "gpu-0000-43-00-0"
	g := small()
	for _, c := range []struct {
		name, a, b string
		gpu        GPU
		want       bool
	}{
		{"one device", firstName, firstName, g, true},
		{"the whole GPU twice", wholeName, wholeName, g, true},
		{"the whole GPU and a partition", wholeName, firstName, g, true},
		{"two GPUs", wholeName, other, g, false},
		{"a virtual machine's GPU twice", vfioName, vfioName, g, true},
		{"a virtual machine's GPU and the whole GPU", vfioName, wholeName, g, true},
		{"a virtual machine's GPU and a share", vfioName, wholeName + "-share", g, true},
		{"a virtual machine's GPU and a partition", vfioName, firstName, g, true},
		{"a virtual machine's GPU and another GPU", vfioName, other, g, false},
		{"partitions of two GPUs at the same start", firstName, other + "-mig-19-0", g, false},
		{"placements without overlap", firstName, lastName, g, false},
		{"placements with overlap", lastName, twoName, g, true},
		{"two parts of one GPU instance", twoName + "-ci-0", twoName + "-ci-1", g, false},
		{"one part of a GPU instance", twoName + "-ci-0", twoName + "-ci-0", g, true},
		{"a GPU instance and a part of it", twoName, twoName + "-ci-1", g, true},
		{"a part of a GPU instance and a placement on it", twoName + "-ci-0", firstName, g, true},
		{"two shares of a GPU", wholeName + "-share", wholeName + "-share", g, false},
		{"a GPU and a share of it", wholeName, wholeName + "-share", g, true},
		{"a share of a GPU and a partition of it", wholeName + "-share", firstName, g, true},
		{"a share of a GPU and a share of a partition of it", wholeName + "-share", firstName + "-share", g, true},
		{"shares of two GPUs", wholeName + "-share", other + "-share", g, false},
		{"two shares of a placement", firstName + "-share", firstName + "-share", g, false},
		{"a placement and a share of it", firstName, firstName + "-share", g, true},
		{"shares of placements without overlap", firstName + "-share", lastName + "-share", g, false},
		{"shares of placements with overlap", lastName + "-share", twoName + "-share", g, true},
		{"a share of a placement and one that overlaps", lastName + "-share", twoName, g, true},
		{"two shares of a part of a GPU instance", twoName + "-ci-0-share", twoName + "-ci-0-share", g, false},
		{"shares of a GPU instance and of a part of it", twoName + "-share", twoName + "-ci-1-share", g, true},
		{"two shares of a placement on an unknown GPU", firstName + "-share", firstName + "-share", GPU{}, false},
		{"placements on an unknown GPU", firstName, lastName, GPU{}, false},
		{"placements with the same start on an unknown GPU", firstName, twoName, GPU{}, true},
		{"placements far beyond the card", wholeName + "-mig-19-4294967295", wholeName + "-mig-0-4294967295", g, true},
	} {
		a, okA := ParseName(c.a)
		b, okB := ParseName(c.b)
		if !okA || !okB {
			t.Fatal(c.a, c.b)
		}
		if Conflict(a, b, c.gpu) != c.want || Conflict(b, a, c.gpu) != c.want {
			t.Errorf("%s: want %v", c.name, c.want)
		}
	}
}
