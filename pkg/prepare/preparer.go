package prepare

import (
	"context"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// Claims knows the claims in the API server.
type Claims interface {
	// Read reads a claim from the API server again. Prepare calls it after a wait in which the claim
	// may have changed.
	Read(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)
	// UnpreparedSince reports whether the claim was unprepared since the arrival of the call to which
	// ctx belongs.
	UnpreparedSince(ctx context.Context, uid types.UID) bool
}

// Edits returns what this node's CDI specs need.
type Edits interface {
	// Verify returns an error if a file or device node that the edits name does not exist on the node.
	Verify(edits specs.ContainerEdits) error
	// MIG returns the edits of the MIG device with GPU instance in and compute instance c. It derives
	// them from parent, the edits of the whole GPU.
	MIG(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits
	// Binding identifies the present binding of a card to its kernel driver, as [nvidia.GPU] has it.
	// It must not access the card.
	Binding(a device.PCIAddress) string
	// Monitor returns the edits with which a container with admin access sees all MIG instances.
	Monitor() specs.ContainerEdits
	// MetadataEdits returns the edits that show a container the metadata file of the claim's request.
	MetadataEdits(c metadata.Claim, request string) (specs.ContainerEdits, error)
	// MPSClient returns the edits that make a container a client of the MPS daemon with this ID.
	MPSClient(daemon string) specs.ContainerEdits
	// MemoryLimit returns the edits that limit a whole container to mebibytes MiB of the memory of
	// the GPU /dev/nvidia<minor>. It is called only for GPUs that support this.
	MemoryLimit(gpuUUID string, minor int, mebibytes uint64) specs.ContainerEdits
}

// Observer learns what happens to claims. Its methods may be called concurrently and must not
// block.
type Observer interface {
	// Unprepared is called under the claim's lock whenever a claim was unprepared. That includes the
	// case that Prepare reverts an earlier preparation of the claim.
	Unprepared(uid types.UID)
	// Repaired is called for each repair.
	Repaired(r Repair)
	// Comparing is called before Reconcile examines the claims' devices.
	Comparing()
	// Compared is called afterwards with the devices that claims have lost. unclear has the claims
	// that Reconcile could not examine or repair, for example because a call was running.
	Compared(lost []*LostError, unclear map[types.UID]bool)
	// Changed is called for each prepared claim whose device got another UUID, because the driver
	// recreated its partition.
	Changed(ctx context.Context, claim kubeletplugin.NamespacedObject)
}

// Repair describes something that the driver found broken and repaired.
type Repair struct {
	// Kind is the value of the metric's label, for example "leftover-spec".
	Kind string
	// What says in words what the driver did.
	//
	// Object is what was repaired: a claim (namespace/name or UID), the ID of an MPS daemon, or the
	// key of a shared setting.
	What, Object string
}

// Report logs the repair and tells the observer.
func (r Repair) Report(ctx context.Context, o Observer) {
	klog.FromContext(ctx).Info(r.What, "repair", r.Kind, "object", r.Object)
	o.Repaired(r)
}

// Options has the settings and the dependencies of a Preparer. Stopping may be nil, all else is
// needed.
type Options struct {
	// Pool is the name of this node's resource pool.
	Pool   string
	Node   steps.Node
	Locks  *lock.Set
	Ledger *ledger.Ledger
	Claims Claims
	Edits  Edits
	// Admit says why the node must not prepare the claim now, or returns nil. old is the claim's
	// record, or empty: a claim keeps a device that it has, also on a GPU that is lost. Prepare may
	// use the hardware until it calls done, which it always does.
	Admit    func(c *resourceapi.ResourceClaim, old checkpoint.Record) (done func(), err error)
	Observer Observer
	// Rescan waits until a new scan has ended, or until its context ends. Then the inventory lists the
	// GPUs that virtual machines gave back.
	Rescan func(context.Context)
	// MPSDisabled means that the administrator switched MPS off. Prepare refuses claims that need MPS.
	// Claims that were prepared with MPS before can still be unprepared.
	MPSDisabled bool
	// Metadata makes Prepare describe the claim's devices to its containers. If it is false, claims
	// that were prepared with it keep their files.
	Metadata bool
	// ConflictWait is how long Prepare waits for a device that another claim uses. Zero means that
	// Prepare does not wait.
	ConflictWait time.Duration
	// Stopping is closed when the plugin stops. That ends the waits for other claims, because the
	// kubelet's next call goes to another plugin instance.
	Stopping <-chan struct{}
}

// Preparer prepares and unprepares claims. It keeps no state between calls.
type Preparer struct {
	opts Options
	node steps.Node
}

// New returns a Preparer.
func New(o Options) *Preparer { return &Preparer{opts: o, node: o.Node} }
