// Names a kernel file's table. The name ends in the instruction set that the file is compiled for.

#pragma once

#define KLFAST_CONCAT_(a, b) a##b
#define KLFAST_CONCAT(a, b) KLFAST_CONCAT_(a, b)
#define KLFAST_TABLE(TYPE, NAME)                                    \
  extern const TYPE KLFAST_CONCAT(NAME##_, KLFAST_INSTRUCTION_SET); \
  const TYPE KLFAST_CONCAT(NAME##_, KLFAST_INSTRUCTION_SET)
