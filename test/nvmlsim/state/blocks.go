package state

import (
	"sync/atomic"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// Block is a way in which processes that only have NVML open are in the way of others.
type Block int

const (
	// ClientBlocksMode is that a process which has a GPU open keeps others from changing its MIG mode.
	ClientBlocksMode Block = iota
	// ClientBlocksDestroy is that a process which has a handle of an instance keeps others from removing it.
	ClientBlocksDestroy
	// CreateInUse is that the first GPU instance of a GPU is refused once: what the driver itself
	// has there goes first.
	CreateInUse
)

// blocks takes what the node file says. What real drivers are known to do is on where it says nothing.
func (h *Header) blocks(n *model.Node) {
	h.ClientBlocksMode = flag(n.ClientBlocksMode)
	h.ClientBlocksDestroy = flag(n.ClientBlocksDestroy == nil || *n.ClientBlocksDestroy)
	h.CreateInUse = flag(n.CreateInUse)
}

// SetBlock switches one on or off.
func (f *File) SetBlock(b Block, on bool) error {
	return f.update(func() error {
		h := f.Header()
		word := map[Block]*uint32{ClientBlocksMode: &h.ClientBlocksMode, ClientBlocksDestroy: &h.ClientBlocksDestroy, CreateInUse: &h.CreateInUse}[b]
		atomic.StoreUint32(word, flag(on))
		return nil
	})
}
