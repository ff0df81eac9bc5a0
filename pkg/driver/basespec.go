package driver

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/publish/leader"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
)

// codeBaseSpec is the code of the condition that baseSpec reports.
const codeBaseSpec = "base-spec-unwritable"

// baseSpec keeps the node-wide base CDI spec and the links to device nodes as the inventory says.
// While the spec cannot be written, the node is not ready. Only one goroutine may use it.
type baseSpec struct {
	node *nodeview.Node
	// leader knows whether a newer plugin instance leads. That one maintains the files that exist once
	// per node: this spec and the CDI hook.
	leader   *leader.Lock
	hardware *quiesce.Access
	specs    *cdi.Store
	paths    nvidia.Paths
	charDir  string // the host's /dev/char, or empty to make no links there

	files string // the fingerprint of the device nodes at the last write
}

// Source implements [nodeview.Check].
func (*baseSpec) Source() string { return "base-spec" }

// Look implements [nodeview.Check].
func (b *baseSpec) Look(ctx context.Context) (*nodeview.Condition, bool) {
	done, ok := b.hardware.Use()
	defer done()
	s := b.node.View().Inventory
	if !ok || !s.Ready || b.leader.NewerLeads() {
		return nil, true // another condition says why the spec is not written
	}
	write := b.specs.WriteBase
	if s.Files != b.files {
		write = b.specs.RewriteBase
	}
	if err := write(s.Node.Common); err != nil {
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
	b.files = s.Files
	return nil, true
}
