package vfio

import (
	"os"
	"path/filepath"
	"testing"
)

func TestAddressableMemoryIsThatOf64BitRegions(t *testing.T) {
	s := tree{t.TempDir()}
	// An H100: 16 MiB, 128 GiB and 32 MiB. Then its virtual functions, which do not count.
	s.add(t, string(gpu), with(gpuFiles("17"), "resource", "0x0000000098000000 0x0000000098ffffff 0x0000000000140204\n"+
		"0x0000000000000000 0x0000000000000000 0x0000000000000000\n"+
		"0x0000218000000000 0x0000219fffffffff 0x000000000014220c\n"+
		"0x0000000000000000 0x0000000000000000 0x0000000000000000\n"+
		"0x00002173e0000000 0x00002173e1ffffff 0x000000000014220c\n"+
		"0x0000000000003000 0x000000000000307f 0x0000000000040101\n"+
		"0x0000000000000000 0x0000000000000000 0x0000000000000000\n"+
		"0x0000216000000000 0x000021603fffffff 0x000000000014220c"))
	if got, err := AddressableMemory(s.dir, gpu); got != 256<<30 || err != nil {
		t.Errorf("%d bytes, %v", got, err)
	}
	s.add(t, "0000:1c:00.0", gpuFiles("18"))
	if got, err := AddressableMemory(s.dir, "0000:1c:00.0"); got != 0 || err != nil {
		t.Errorf("without the file: %d bytes, %v", got, err)
	}
}

func TestHasIOMMUFD(t *testing.T) {
	for file, want := range map[string]bool{"": false, "module/vfio": false, "module/iommufd": true, "class/misc/iommu": true} {
		sysfs := t.TempDir()
		if err := os.MkdirAll(filepath.Join(sysfs, file), 0o750); err != nil {
			t.Fatal(err)
		}
		if got := HasIOMMUFD(sysfs); got != want {
			t.Errorf("%q: %t", file, got)
		}
	}
}
