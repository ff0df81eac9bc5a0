package state

import (
	"sync/atomic"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// Block names a condition under which the simulated driver refuses a MIG change because a process
// uses the GPU.
type Block int

const (
	// ClientBlocksMode means that no process can change a GPU's MIG mode while another has the GPU
	// open in NVML.
	ClientBlocksMode Block = iota
	// ClientBlocksDestroy means that a MIG instance cannot be destroyed while another process has a
	// handle of it.
	ClientBlocksDestroy
	// CreateInUse means that the first attempt to create a GPU's first GPU instance fails with IN_USE,
	// as if the driver itself still used the GPU.
	CreateInUse
)

// blocks copies the Block settings of the node file into the header. By default only
// ClientBlocksDestroy is on, because real drivers are known to behave so.
func (h *Header) blocks(n *model.Node) {
	h.ClientBlocksMode = flag(n.ClientBlocksMode)
	h.ClientBlocksDestroy = flag(n.ClientBlocksDestroy == nil || *n.ClientBlocksDestroy)
	h.CreateInUse = flag(n.CreateInUse)
	h.NoCapabilityNodes = flag(n.NoCapabilityNodes)
	h.SettingsStay = flag(n.SettingsStay)
	h.TopologyStays = flag(n.TopologyStays)
	h.UUIDBySyspipe = flag(n.UUIDBySyspipe)
	h.FabricByInstances = flag(n.FabricByInstances)
	h.NoRemapFields = flag(n.NoRemapFields)
	h.EarlyWait = flag(n.EarlyWait)
	h.LostAnswer = uint32(lostAnswerOf(n.LostGPU))
	h.GSPTimeoutMS = defaultGSPTimeoutMS
	h.ConfCompute = uint32(confComputeOf(n.ConfidentialComputing))
}

// ConfCompute is the state of confidential computing. The values are those of enum
// nvmlsim_conf_compute in lib/state.h.
type ConfCompute uint32

const (
	ConfComputeOff ConfCompute = iota
	ConfComputeNotReady
	ConfComputeReady
)

func confComputeOf(name string) ConfCompute {
	return map[string]ConfCompute{model.ConfComputeNotReady: ConfComputeNotReady, model.ConfComputeReady: ConfComputeReady}[name]
}

// SetConfCompute sets the state of confidential computing on the node.
func (f *File) SetConfCompute(c ConfCompute) error {
	return f.update(func() error {
		atomic.StoreUint32(&f.Header().ConfCompute, uint32(c))
		return nil
	})
}

// SetBlock switches the block b on or off for the whole node.
func (f *File) SetBlock(b Block, on bool) error {
	return f.update(func() error {
		h := f.Header()
		word := map[Block]*uint32{ClientBlocksMode: &h.ClientBlocksMode, ClientBlocksDestroy: &h.ClientBlocksDestroy,
			CreateInUse: &h.CreateInUse}[b]
		atomic.StoreUint32(word, flag(on))
		return nil
	})
}
