// Package preparetest assembles the rooms of the transaction for tests.
package preparetest

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/ledger"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/reconcile"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
)

// Transaction is the transaction of one plugin process.
type Transaction struct {
	*prepare.Preparer
	*reconcile.Reconciler
	*ledger.Ledger
	steps.Node
}

// New assembles a Transaction. What o lacks does nothing: no partitions, no MPS daemons, no
// observer, no edits. It refuses no claim.
func New(o prepare.Options) Transaction {
	if o.Node.Partitions == nil {
		o.Node.Partitions = NoPartitions{}
	}
	if o.Node.MPS == nil {
		o.Node.MPS = NoDaemons{}
	}
	if o.Observer == nil {
		o.Observer = &Observer{}
	}
	if o.Claims == nil {
		o.Claims = &Claims{}
	}
	if o.Edits == nil {
		o.Edits = &Edits{}
	}
	if o.Admit == nil {
		o.Admit = func(*resourceapi.ResourceClaim, checkpoint.Record) (func(), error) { return func() {}, nil }
	}
	if o.Rescan == nil {
		o.Rescan = func(context.Context) {}
	}
	o.Ledger = ledger.New(o.Node.Records, o.Node.BootID, o.Node.Hardware)
	p := prepare.New(o)
	return Transaction{p, reconcile.New(p, o), o.Ledger, o.Node}
}

// Observer calls the functions that are set.
type Observer struct {
	OnUnprepared func(types.UID)
	OnCompared   func(lost []*prepare.LostError, unclear map[types.UID]bool)
	OnRepaired   func(prepare.Repair)
	OnChanged    func(kubeletplugin.NamespacedObject)
}

// Unprepared implements [prepare.Observer].
func (o *Observer) Unprepared(uid types.UID) { call(o.OnUnprepared, uid) }

// Comparing implements [prepare.Observer].
func (o *Observer) Comparing() {}

// Compared implements [prepare.Observer].
func (o *Observer) Compared(lost []*prepare.LostError, unclear map[types.UID]bool) {
	if o.OnCompared != nil {
		o.OnCompared(lost, unclear)
	}
}

// Repaired implements [prepare.Observer].
func (o *Observer) Repaired(r prepare.Repair) { call(o.OnRepaired, r) }

// Changed implements [prepare.Observer].
func (o *Observer) Changed(_ context.Context, c kubeletplugin.NamespacedObject) { call(o.OnChanged, c) }

func call[T any](f func(T), v T) {
	if f != nil {
		f(v)
	}
}

// Claims calls the functions that are set.
type Claims struct {
	OnRead            func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)
	OnUnpreparedSince func(ctx context.Context, uid types.UID) bool
}

// Read implements [prepare.Claims].
func (c *Claims) Read(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	return c.OnRead(ctx, namespace, name)
}

// UnpreparedSince implements [prepare.Claims].
func (c *Claims) UnpreparedSince(ctx context.Context, uid types.UID) bool {
	return c.OnUnpreparedSince != nil && c.OnUnpreparedSince(ctx, uid)
}

// Edits calls the functions that are set.
type Edits struct {
	OnVerify      func(specs.ContainerEdits) error
	OnMIG         func(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits
	OnBinding     func(a device.PCIAddress) string
	OnMonitor     func() specs.ContainerEdits
	OnMetadata    func(c metadata.Claim, request string) (specs.ContainerEdits, error)
	OnMPSClient   func(daemon string) specs.ContainerEdits
	OnMemoryLimit func(gpuUUID string, minor int, mebibytes uint64) specs.ContainerEdits
}

// Verify implements [prepare.Edits].
func (e *Edits) Verify(edits specs.ContainerEdits) error {
	if e.OnVerify == nil {
		return nil
	}
	return e.OnVerify(edits)
}

// MIG implements [prepare.Edits].
func (e *Edits) MIG(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits {
	return e.OnMIG(parent, in, c)
}

// Binding implements [prepare.Edits].
func (e *Edits) Binding(a device.PCIAddress) string {
	if e.OnBinding == nil {
		return ""
	}
	return e.OnBinding(a)
}

// Monitor implements [prepare.Edits].
func (e *Edits) Monitor() (none specs.ContainerEdits) {
	if e.OnMonitor == nil {
		return none
	}
	return e.OnMonitor()
}

// Metadata implements [prepare.Edits].
func (e *Edits) MetadataEdits(c metadata.Claim, request string) (specs.ContainerEdits, error) {
	if e.OnMetadata == nil {
		return metadata.NewFiles("/metadata").MetadataEdits(c, request)
	}
	return e.OnMetadata(c, request)
}

// MPSClient implements [prepare.Edits].
func (e *Edits) MPSClient(daemon string) (none specs.ContainerEdits) {
	if e.OnMPSClient == nil {
		return none
	}
	return e.OnMPSClient(daemon)
}

// MemoryLimit implements [prepare.Edits].
func (e *Edits) MemoryLimit(gpuUUID string, minor int, mebibytes uint64) (none specs.ContainerEdits) {
	if e.OnMemoryLimit == nil {
		return none
	}
	return e.OnMemoryLimit(gpuUUID, minor, mebibytes)
}
