package migrate_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/migrate"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

const gpuName = "gpu-0000-1b-00-0"

// node fakes a node with one GPU that has MIG instances, and a claim of NVIDIA's DRA driver.
type node struct {
	claims    []predecessor.Claim
	scanned   bool
	there     []device.Instance
	locked    []string // what WithLocks locks while it runs
	destroyed []uint32
	mode      device.ComputeMode
	slice     device.TimeSlice
	repairs   []string
	warnings  []string
	updated   bool
}

func (n *node) Claim(uid types.UID) (predecessor.Claim, bool, error) {
	for _, c := range n.claims {
		if c.UID == uid {
			return c, true, nil
		}
	}
	return predecessor.Claim{}, false, nil
}

func (n *node) MarkEnded(ended predecessor.Claim) (string, error) {
	n.claims = slices.DeleteFunc(n.claims, func(c predecessor.Claim) bool { return c.UID == ended.UID })
	return "", nil
}

func (n *node) Snapshot() inventory.Snapshot {
	if !n.scanned {
		return inventory.Snapshot{Reason: "no scan yet"}
	}
	gpu := nvidia.GPU{GPU: device.GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-1"}}
	return inventory.Snapshot{Known: true, Node: nvidia.Node{GPUs: []nvidia.GPU{gpu}}}
}

func (n *node) WithLocks(ctx context.Context, uid types.UID, gpus []string, work func(context.Context) error) error {
	n.locked = append(slices.Clone(gpus), string(uid))
	defer func() { n.locked = nil }()
	return work(ctx)
}

func (n *node) Look(context.Context, device.Card) (device.CardState, error) {
	return device.CardState{MIG: device.MIG{Enabled: true, Instances: n.there}}, nil
}

func (n *node) Destroy(_ context.Context, _ device.Card, in device.Instance) error {
	if slices.Contains(n.locked, gpuName) {
		n.destroyed = append(n.destroyed, in.ID)
	}
	return nil
}

func (n *node) SetComputeMode(_ context.Context, _ device.Card, to device.ComputeMode) error {
	n.mode = to
	return nil
}

func (n *node) SetTimeSlice(_ context.Context, _ device.Card, to device.TimeSlice) error {
	n.slice = to
	return nil
}

func (n *node) Repaired(r prepare.Repair) { n.repairs = append(n.repairs, r.Kind+" "+r.Object) }

func (n *node) Event(reason events.Reason, message string) {
	n.warnings = append(n.warnings, reason.String()+": "+message)
}

func (n *node) Update() { n.updated = true }

// heldClaim returns a claim with a MIG instance and an MPS daemon.
func heldClaim() predecessor.Claim {
	return predecessor.Claim{UID: "u-1", MPS: true, TimeSlices: true, Daemons: []string{"u-1-abc"}, Devices: []predecessor.Device{{
		Name: "gpu-0-mig-1g10gb-19-0", GPUUUID: "GPU-1",
		MIG: &predecessor.MIG{UUID: "MIG-1", GPUInstanceID: ptr.To[uint32](7), ComputeInstanceID: ptr.To[uint32](0)},
	}}}
}

func (n *node) migrator(t *testing.T) (m *migrate.Migrator, spec string) {
	t.Helper()
	root := t.TempDir()
	spec = filepath.Join(root, "k8s.gpu.nvidia.com-claim_u-1.yaml")
	if err := os.WriteFile(spec, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return migrate.New(migrate.Options{
		CDIRoot: root, Checkpoint: n, Snapshot: n.Snapshot, WithLocks: n.WithLocks, GPUs: n, Reports: n, Update: n.Update,
	}), spec
}

func TestOnlyProvenPartitionIsRemoved(t *testing.T) {
	part := func(id uint32, uuid string) device.Instance {
		return device.Instance{ID: id, ProfileID: 19, Compute: []device.ComputeInstance{{ID: 0, UUID: uuid}}}
	}
	for name, c := range map[string]struct {
		there     []device.Instance
		destroyed []uint32
	}{
		"it is unchanged":                {[]device.Instance{part(3, "MIG-other"), part(7, "MIG-1")}, []uint32{7}},
		"its ID was reused":              {[]device.Instance{part(7, "MIG-2")}, nil},
		"its UUID is another instance's": {[]device.Instance{part(8, "MIG-1")}, nil},
		"an admin added a compute instance": {[]device.Instance{
			{ID: 7, Compute: []device.ComputeInstance{{UUID: "MIG-1"}, {ID: 1, UUID: "MIG-3"}}},
		}, nil},
		"it is gone": {nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := &node{claims: []predecessor.Claim{heldClaim()}, scanned: true, there: c.there}
			m, spec := n.migrator(t)
			if err := m.EndClaim(t.Context(), "u-1"); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(n.destroyed, c.destroyed) || n.mode != device.ComputeDefault || n.slice != device.TimeSliceDefault {
				t.Errorf("destroyed %v, want %v; compute mode %q, time slice %v", n.destroyed, c.destroyed, n.mode, n.slice)
			}
			if len(n.claims) != 0 || !n.updated || !slices.Equal(n.repairs, []string{"predecessor-claim claim u-1"}) {
				t.Errorf("left: %v; node view updated %v; repairs %q", n.claims, n.updated, n.repairs)
			}
			want := "kubectl delete deployments --all-namespaces --field-selector metadata.name=mps-control-daemon-u-1-abc"
			if len(n.warnings) != 1 || !strings.HasPrefix(n.warnings[0], "PredecessorDaemon: ") || !strings.Contains(n.warnings[0], want) {
				t.Errorf("Events: %q", n.warnings)
			}
			if _, err := os.Stat(spec); !os.IsNotExist(err) {
				t.Errorf("the CDI spec is still there: %v", err)
			}
		})
	}
}

func TestClaimEndsOnlyOnceHardwareIsKnown(t *testing.T) {
	n := &node{claims: []predecessor.Claim{heldClaim()}}
	m, _ := n.migrator(t)
	if err := m.EndClaim(t.Context(), "u-1"); err == nil || !strings.Contains(err.Error(), "hardware is not scanned yet: no scan yet") {
		t.Errorf("%v", err)
	}
	if len(n.claims) != 1 || len(n.warnings)+len(n.repairs) != 0 {
		t.Errorf("claims %v, reported %q, %q", n.claims, n.warnings, n.repairs)
	}
}

func TestUnknownClaimIsIgnored(t *testing.T) {
	n := &node{claims: []predecessor.Claim{heldClaim()}, scanned: true}
	m, _ := n.migrator(t)
	if err := m.EndClaim(t.Context(), "other"); err != nil || len(n.claims) != 1 || n.updated {
		t.Errorf("%v, claims %v", err, n.claims)
	}
}
