package nodeview

import (
	"context"

	"k8s.io/klog/v2"
)

// CodeHookMissing is the code of the condition that HookCheck reports.
const CodeHookMissing = "hook-missing"

// Hook is a hook binary on the host.
type Hook interface {
	Install() (changed bool, err error)
	Check() error
}

// HookCheck installs the hook binaries on the host. If the CDI hook is missing there or the host
// must not execute it, no container with a GPU can start.
type HookCheck struct {
	CDI, MPS Hook
	// Path is where the CDI hook is installed.
	Path string
}

// Source implements [Check].
func (h HookCheck) Source() string { return "hook" }

// Look implements [Check].
func (h HookCheck) Look(ctx context.Context) (*Condition, bool) {
	changed, err := h.CDI.Install()
	if err == nil {
		err = h.CDI.Check()
	}
	if err != nil {
		return &Condition{Code: CodeHookMissing, Message: err.Error(), Types: NVIDIATypes}, true
	}
	if changed {
		klog.FromContext(ctx).Info("Installed the CDI hook on the host", "path", h.Path)
	}
	// Only MPS shares with a limited part of the GPU's memory need the MPS hook. If it cannot be
	// installed, only the claims for such shares fail.
	if _, err := h.MPS.Install(); err != nil {
		klog.FromContext(ctx).Error(err, "Failed to install the MPS hook; claims for MPS shares with a memory limit for the container "+
			"cannot be prepared")
	}
	return nil, true
}
