class OutOfMemoryError(MemoryError): ...

class MemoryPointer:
    ptr: int

class MemoryPool:
    def malloc(self, size: int) -> MemoryPointer: ...
