package driver

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish/leader"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
)

// codeBaseSpec is the code of the condition that baseSpec reports.
const codeBaseSpec = "base-spec-unwritable"

// baseSpec keeps the node-wide base CDI spec and the links to device nodes as the last scan found
// them. While the spec cannot be written, the node is not ready.
//
// The leader is the spec's only writer: another instance may be of another version and make another
// spec of the same scan. Others write it only where there is no usable one, as Prepare does.
type baseSpec struct {
	*cdi.Store
	// inventory has the scan. The node view also has GPUs that no scan of NVIDIA's driver found.
	inventory *inventory.Inventory
	leader    *leader.Lock
	hardware  *quiesce.Access
	visible   cdi.Mapper
	paths     nvidia.Paths
	charDir   string // the host's /dev/char, or empty to make no links there

	files string // the fingerprint of the device nodes at the last write. Only Look uses it
}

// WriteBase implements [reconciler.Specs].
func (b *baseSpec) WriteBase(edits specs.ContainerEdits) error {
	_, err := b.keep(edits, b.Store.WriteBase)
	return err
}

// keep calls write if this instance leads.
func (b *baseSpec) keep(edits specs.ContainerEdits, write func(specs.ContainerEdits) error) (leads bool, err error) {
	if leads, err = b.leader.WhileLeading(func() error { return write(edits) }); !leads {
		err = b.EnsureBase(edits, b.visible.Verify)
	}
	return leads, err
}

// Source implements [nodeview.Check].
func (*baseSpec) Source() string { return "base-spec" }

// Look implements [nodeview.Check].
func (b *baseSpec) Look(ctx context.Context) (*nodeview.Condition, bool) {
	done, ok := b.hardware.Use()
	defer done()
	s := b.inventory.Snapshot()
	if !ok || !s.Ready {
		return nil, true // another condition says why the spec is not written
	}
	write := b.Store.WriteBase
	if s.Files != b.files {
		write = b.RewriteBase
	}
	leads, err := b.keep(s.Node.Common, write)
	if err != nil {
		return &nodeview.Condition{
			Code: codeBaseSpec, Transient: true, Types: nodeview.NVIDIATypes,
			Message: fmt.Sprintf("cannot write the node-wide CDI spec: %v", err),
		}, true
	}
	if b.charDir != "" {
		if err := scan.LinkDeviceNodes(b.paths, s.Node, b.charDir); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to link device nodes by number; "+
				"containers may lose their GPU when systemd reloads its units")
		}
	}
	if leads {
		b.files = s.Files
	}
	return nil, true
}
