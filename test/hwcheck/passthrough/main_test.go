package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

func TestReportSaysWhatPassthroughWouldOffer(t *testing.T) {
	aliases := filepath.Join(t.TempDir(), "modules.alias")
	if err := os.WriteFile(aliases, []byte("alias vfio_pci:v000010DEd*sv* grace_vfio_pci\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	g := vfio.Group{
		GPU:    vfio.Function{Address: "0000:1b:00.0", Vendor: 0x10de, Driver: "nvidia", ModAlias: "pci:v000010DEd00002330sv000010DE"},
		Number: 17, ResetMethods: []string{"flr"},
		Companions: []vfio.Function{{Address: "0000:1b:00.1", Class: 0x0403, Driver: "snd_hda_intel"}},
	}
	const want = `0000:1b:00.0 could be offered
  driver "nvidia", override "", group 17, reset methods ["flr"], module grace_vfio_pci
  with 0000:1b:00.1 (class 0403, driver "snd_hda_intel")`
	if got := describeGroup(g, aliases); got != want {
		t.Errorf("got\n%s, want\n%s", got, want)
	}
	g.GPU.Driver = "vfio-pci"
	if got := describeGroup(g, aliases+".missing"); !strings.Contains(got, "bound already") || !strings.Contains(got, "unknown (no ") {
		t.Error(got)
	}
	g.ResetMethods = nil
	if got := describeGroup(g, aliases); !strings.Contains(got, "could not be offered: the kernel cannot reset it") {
		t.Error(got)
	}
	if got := describe(t.TempDir(), "0000:1b:00.0", aliases); !strings.Contains(got, "0000:1b:00.0: class: the file is missing") {
		t.Error(got)
	}
}
